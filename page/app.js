// The page: its sections, and the messages to its worker.
"use strict";

const TOLERANCE = 1e-3; // of the largest logit, or of 1: more is not Python's model
const PACE = 20; // characters per second, while the page writes by itself
const SURPRISE = Math.log(10); // nats: a probability below 10 %

// Show the likeliest characters at the position of an item, and the character that was taken.
// Choosing a different one calls `choose(id)`; without `choose`, none can be.
function showWhy(panel, vocabulary, item, choose) {
  const name = quoted(vocabulary[item.id]);
  if (item.nats === undefined) return panel.replaceChildren(`${name} was given: it has no loss.`);
  const p = Math.exp(-item.nats);
  const note = `Rank ${count(item.rank)}. Percentages are those before temperature and filters.`;
  const chance = element("span", { text: percent(p), tabindex: 0, "data-note": note });
  const parts = [chance, ", loss ", lossOf(item.nats, 2)];
  const heading = element("p", { text: `${name}: probability ` }, parts);
  const rows = [...item.top];
  if (!rows.some(([id]) => id === item.id)) rows.push([item.id, p]);
  const list = rows.map(([id, share]) => {
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    const button = element("button", { className: id === item.id ? "taken" : "" }, [
      element("span", { text: characterName(vocabulary[id]) }),
      element("span", { className: "bar", "aria-hidden": "true" }, [bar]),
      element("span", { className: "share", text: percent(share) }),
    ]);
    button.disabled = id === item.id || !choose;
    button.addEventListener("click", () => choose(id));
    return element("li", {}, [button]);
  });
  panel.replaceChildren(heading, element("ol", {}, list));
}

// Show the likeliest next characters after each layer, and the probability of the one taken there.
function showLens(vocabulary, lens, id) {
  const rows = lens.map(({ nats, top }, layer) => {
    const chips = top.map(([other, share]) => {
      const character = vocabulary[other];
      const chip = element("span", {
        className: other === id ? "taken" : "",
        text: { "\n": "↵", " ": "␣", "\t": "⇥" }[character] || characterName(character),
        title: `${characterName(character)}: ${percent(share)}`,
      });
      chip.classList.toggle("name", chip.textContent.length > 2);
      chip.style.setProperty("--share", Math.sqrt(share)); // small ones can be told apart
      return chip;
    });
    return element("tr", {}, [
      element("th", { scope: "row", text: layer + 1 }),
      element("td", {}, chips),
      element("td", { text: percent(Math.exp(-nats)) }),
    ]);
  });
  $("taken").textContent = quoted(vocabulary[id]);
  $("lens").replaceChildren(...rows);
}

// Start the worker. Return `ask(job, message, answer)`, which starts a job and ends the previous
// one of the same name; `answer` is called with each report of the job.
function startWorker(failed) {
  const code = $("model-code").textContent + $("worker-code").textContent;
  const worker = new Worker(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
  const answers = {};
  let number = 0;
  worker.onerror = (event) => failed(event.message || "the worker could not start");
  worker.onmessage = ({ data }) => {
    if (data.number === answers[data.job]?.number) answers[data.job].answer(data);
  };
  return (job, message, answer = () => {}) => {
    answers[job] = { number: ++number, answer };
    worker.postMessage({ job, number, ...message });
  };
}

// ------------------------------------------------------------------------------------ the sections

function showPage() {
  // a browser saves the page as it stands: filled, and with what is hidden at first
  for (const id of ["switches", "layer", "facts"]) $(id).replaceChildren();
  for (const shown of document.querySelectorAll("main, [role=alert]")) shown.hidden = true;
  const data = JSON.parse($("data").textContent);
  const vocabulary = Array.from(data.vocabulary);
  const ids = new Map(vocabulary.map((c, id) => [c, id]));
  const fail = (text) => {
    $("failure").textContent = text;
    $("failure").hidden = false;
  };
  const ask = startWorker((reason) => fail(`page/model.js cannot run this model: ${reason}.`));
  const { shapes, config, items } = data;
  config.separator = Array.from(items?.separator ?? "", (c) => ids.get(c));
  ask("load", { base64: $("weights").textContent, shapes, config });

  $("title").textContent = readable(data.about.text);
  document.title = `${readable(data.about.text)}: a GPT in a page`;
  const heads = showHeads(ask, config);
  const inspect = showAttention(ask, vocabulary, config, heads);
  showWrite(ask, vocabulary, ids, data, inspect, heads);
  showAbout(data, vocabulary);
  document.querySelector("main").hidden = false;
  ask("check", { check: data.check }, ({ difference }) => {
    if (difference <= TOLERANCE) return;
    fail(
      "This page is not the model that was trained: its logits differ from Python's by up to " +
        `${percent(difference)} of the largest. page/model.js must compute what model/gpt.py does.`,
    );
  });
}

// Show a switch for each head. Return `off`, the heads that are off, each as layer * H + head, and
// `changed`, which is called after a change.
function showHeads(ask, { n_layer: layers, n_head: H }) {
  const heads = { off: new Set(), changed() {} };
  for (let layer = 0; layer < layers; layer++) {
    const row = Array.from({ length: H }, (_, head) => {
      const n = layer * H + head;
      const label = { "aria-label": `layer ${layer + 1} head ${head + 1}`, "aria-pressed": true };
      const button = element("button", { text: head + 1, ...label });
      button.addEventListener("click", () => {
        const on = heads.off.delete(n);
        if (!on) heads.off.add(n);
        button.setAttribute("aria-pressed", on);
        ask("heads", { off: Array.from(heads.off) });
        heads.changed();
      });
      return button;
    });
    $("switches").append(element("p", { text: `Layer ${layer + 1}` }, row));
  }
  return heads;
}

function showWrite(ask, vocabulary, ids, data, inspect, heads) {
  const { config, items } = data;
  const answers = Boolean(items?.answer_after);
  const names = Object.keys(data.settings);
  for (const name of names) $(name).value = data.settings[name];
  $("prompt").value = data.prompt;
  if (answers) {
    $("what").textContent = "It answers questions";
    $("try").textContent = "Ask another one, or click a character";
    $("prompt-label").textContent = "Question";
  }
  // With an empty prompt, the text starts after a hidden newline (else a space, else id 0); in a
  // list, always after the end of an item.
  const start = config.separator.at(-1) ?? ids.get("\n") ?? ids.get(" ") ?? 0;
  let [writing, prompt, settings, given, end, rate, shown] = [false, null, null, 0, 0, 0, null];
  let alive = true; // the page writes by itself, until the reader takes over
  let before = null; // the losses of the text until all is scored again with other heads

  const why = (i) => {
    shown = i;
    showWhy($("why"), vocabulary, view.items[i], i > 0 ? (id) => replace(i, id) : undefined);
    $("inside").hidden = i === 0 || i !== view.selected;
  };
  const look = (i) =>
    inspect(view.ids, i, view.first, (lens) => showLens(vocabulary, lens, view.ids[i]));
  const panel = $("why");
  const view = new TextView($("text"), vocabulary, { onShow: why, onSelect: look, panel });

  // Take over the settings of the fields; return whether all are valid.
  const takeSettings = () => {
    const wrong = names.find((name) => !$(name).checkValidity());
    if (wrong) $("settings").open = true;
    else settings = Object.fromEntries(names.map((name) => [name, Number($(name).value)]));
    return !wrong || $(wrong).reportValidity();
  };

  const clear = () => {
    view.clear();
    [prompt, shown, before, end, rate] = [null, null, null, 0, 0];
    $("why").replaceChildren();
    $("effect").replaceChildren();
    $("inside").hidden = true;
    inspect();
  };

  // Begin a new text with the prompt; return whether that is possible.
  const begin = () => {
    const typed = $("prompt").value;
    const known = Array.from(typed).every((c) => ids.has(c));
    const value = known ? typed : typed.normalize("NFC"); // `e` and an accent are `é`
    const characters = Array.from(value);
    const unknown = new Set(characters.filter((c) => !ids.has(c)));
    $("prompt-error").hidden = !unknown.size;
    $("prompt-error").textContent = `Left out, never read: ${[...unknown].map(codePoint).join(" ")}`;
    const text = characters.filter((c) => ids.has(c)).map((c) => ids.get(c));
    if (answers && !value.split(items.separator).at(-1).includes(items.answer_after)) {
      $("prompt-error").textContent = `A question ends with “${readable(items.answer_after)}”.`;
      $("prompt-error").hidden = false;
      return false;
    }
    clear();
    prompt = value;
    const started = text.length && !items;
    view.append(started ? [] : [{ id: start }], { given: true, hidden: true });
    view.append(text.map((id) => ({ id })), { given: true });
    given = end = view.items.length;
    return true;
  };

  // Score the characters that the present heads have not scored, then write up to position `until`.
  const write = (until, pace = 0) => {
    const text = view.ids;
    const scored = view.items.map(({ nats }) => nats !== undefined);
    const first = scored.indexOf(true);
    let from = answers ? given : windowStartIn(text, text.length, config) + 1; // no question
    if (first >= 0) from = before ? first : scored.lastIndexOf(true) + 1;
    writing = until > text.length;
    const message = { ids: text, from, end: until, settings, pace, answer: answers };
    ask("write", message, (report) => {
      const known = Math.max(0, view.items.length - report.from);
      report.items.slice(0, known).forEach((item, i) => view.update(report.from + i, item));
      view.append(report.items.slice(known));
      rate = report.rate;
      writing = !report.done && until > text.length;
      if (shown >= report.from && shown < report.from + report.items.length) why(shown);
      if (before && report.from + report.items.length >= before.length) sayChange();
      if (alive && view.selected === null) selectSurprise();
      if (alive && report.done) view.reveal(view.selected);
      update();
    });
    update();
  };

  const pause = () => {
    ask("write", { stop: true });
    writing = false;
    update();
  };

  // Select the first character drawn with a low probability; at the end of the text, the one with
  // the lowest. At the start of a text or an item, there is nothing to attend to yet.
  const selectSurprise = () => {
    const text = view.ids;
    const read = (i) => i - windowStartIn(text, i, config);
    const losses = view.items.map(({ nats }, i) => (i >= given && read(i) > 2 ? nats : 0));
    const first = losses.findIndex((nats) => nats > SURPRISE);
    if (first >= 0) view.select(first);
    else if (!writing) view.select(Math.max(given, argmax(losses)));
  };

  const takeOver = ({ target }) => {
    if (alive && writing && !$("write").contains(target)) pause(); // its own click pauses or writes
    alive = false;
  };
  for (const event of ["click", "keydown"]) document.addEventListener(event, takeOver, true);

  // Replace character i by a different one and continue the text from there.
  const replace = (i, id) => {
    if (!takeSettings()) return;
    const { top } = view.items[i];
    const rank = top.findIndex(([other]) => other === id) + 1;
    view.truncate(i);
    before?.splice(i);
    if (!before?.some((nats) => nats !== undefined)) {
      before = null; // nothing is left to compare
      $("effect").replaceChildren();
    }
    view.append([{ id, top, rank, nats: -Math.log(top[rank - 1][1]) }]);
    view.selected = null;
    view.select(i);
    view.box.focus({ preventScroll: true }); // the button that was chosen is gone
    if (end <= i + 1) end = i + 1 + settings.max_new_tokens;
    write(answered() ? i + 1 : end);
  };

  // Say how the losses have changed with the heads, and which has changed most.
  const sayChange = () => {
    const scored = Array.from(before.keys()).filter((i) => before[i] !== undefined);
    const difference = (i) => Math.abs(view.items[i].nats - before[i]);
    const mean = (loss) => scored.reduce((sum, i) => sum + loss(i), 0) / scored.length;
    const [was, is] = [mean((i) => before[i]), mean((i) => view.items[i].nats)];
    const most = scored.reduce((best, i) => (difference(i) > difference(best) ? i : best));
    const around = view.items.slice(Math.max(0, most - 12), most).map(({ id }) => vocabulary[id]);
    const name = quoted(vocabulary[view.items[most].id]);
    const button = element("button", { text: `${name} after “${isolated(readable(around))}”` });
    button.addEventListener("click", () => view.selected === most || view.select(most));
    const [p, now] = [before[most], view.items[most].nats].map((nats) => percent(Math.exp(-nats)));
    $("effect").replaceChildren(
      `Mean loss: ${was.toFixed(4)} → ${is.toFixed(4)} nats. Changed most: `,
      button, `: ${p} → ${now}.`,
    );
    before = null;
  };

  heads.changed = () => {
    if (view.selected !== null) look(view.selected);
    if (view.items.every(({ nats }) => nats === undefined)) return;
    before ||= view.items.map(({ nats }) => nats);
    $("effect").textContent = "The text is read again.";
    write(writing ? end : view.items.length);
  };

  // Whether the answer has ended, as an item does: nothing can follow it.
  const answered = () => {
    const n = view.items.length;
    return answers && n > given && windowStartIn(view.ids, n, config) === n - 1;
  };
  // Whether a click begins a new text.
  const afresh = () => prompt !== $("prompt").value || answered();

  // Write more characters, by default as many as the setting says.
  const proceed = (length, pace = 0) => {
    if (!takeSettings()) return;
    if (afresh() && !begin()) return update();
    end = view.items.length + (length ?? settings.max_new_tokens);
    write(end, pace);
  };
  $("write").addEventListener("click", () => (writing ? pause() : proceed()));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || items?.separator !== "\n") return; // the prompt is one line
    // this Enter confirms a candidate of an input method; Safari says so with 229
    if (event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    proceed();
  });
  $("step").addEventListener("click", () => proceed(1));
  $("restart").addEventListener("click", () => {
    clear();
    pause();
  });
  $("copy").addEventListener("click", async () => {
    const text = view.ids.slice(view.first).map((id) => vocabulary[id]);
    try {
      await navigator.clipboard.writeText(text.join(""));
      $("status").textContent = `Copied ${count(text.length)} characters.`;
    } catch {
      getSelection().selectAllChildren(view.box);
      $("status").textContent = "The text is selected: copy it with Ctrl-C or Cmd-C.";
    }
  });
  $("prompt").addEventListener("input", () => {
    $("prompt-error").hidden = true;
    update();
  });

  const update = () => {
    const written = view.items;
    const start = windowStartIn(view.ids, written.length, config);
    view.markWindow(answers ? 0 : start); // no question follows an answer
    const label = written.length && !afresh() ? "Continue" : answers ? "Answer" : "Write";
    $("write").textContent = writing ? "Pause" : label;
    $("status").setAttribute("aria-busy", writing); // read out when it is complete
    $("step").disabled = writing;
    $("restart").disabled = $("copy").disabled = !written.length;
    const losses = written.map(({ nats }) => nats).filter((nats) => nats !== undefined);
    if (!losses.length) return $("status").replaceChildren();
    const mean = losses.reduce((sum, nats) => sum + nats, 0) / losses.length;
    const speed = rate > 0 ? ` · ${count(Math.round(rate))} characters/s` : "";
    $("status").replaceChildren(
      `${count(written.length - view.first)} characters${speed} · mean loss `,
      lossOf(mean, 4, " The stronger its color, the higher the loss of a character."),
      ` (lower is better)${heads.off.size ? `, heads off: ${heads.off.size}` : ""}`,
    );
  };
  proceed(null, matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : PACE);
}

// Return `inspect(ids, n, hidden, onLens)`, which shows what the model attended to when it predicted
// character n, and calls `onLens` with what each layer would have predicted. In the text one does
// not see the first `hidden` characters.
function showAttention(ask, vocabulary, config, heads) {
  const { n_layer: layers, n_head: H } = config;
  let [result, head] = [null, 0];
  for (let i = 0; i < layers; i++) $("layer").append(element("option", { text: i + 1, value: i }));
  $("layer").value = layers - 1;
  $("layer").addEventListener("change", () => draw());
  const view = new TextView($("window"), vocabulary, { onSelect: (i) => view.select(i) });

  const draw = () => {
    const { window, attention } = result;
    const first = Number($("layer").value) * H; // head of the layer
    const row = attention[first + head];
    const most = argmax(row);
    $("most").textContent = `most to ${quoted(vocabulary[window[most]])}, ${percent(row[most])}`;
    $("shown").textContent = head + 1;
    row.forEach((weight, i) => {
      view.spans[i].style.setProperty("--weight", weight / row[most]);
      view.spans[i].title = percent(weight);
    });
    const rows = Array.from({ length: H }, (_, h) => {
      const n = first + h;
      const label = { "aria-label": `Show head ${h + 1}`, "aria-pressed": h === head };
      const button = element("button", { text: h + 1, ...label });
      button.addEventListener("click", () => {
        head = h;
        draw();
        $("heads").querySelectorAll("button")[h].focus({ preventScroll: true });
      });
      return element("tr", { className: heads.off.has(n) ? "off" : "" }, [
        element("td", {}, [button]),
        element("td", {}, [strip(attention[n])]),
      ]);
    });
    $("heads").replaceChildren(...rows);
  };

  return (ids, n, hidden, onLens) => {
    if (!n) {
      ask("inspect", { stop: true });
      return ($("attention").hidden = true); // it was not predicted
    }
    $("attention").setAttribute("aria-busy", true);
    ask("inspect", { ids: ids.slice(0, n + 1), n }, (report) => {
      result = report;
      const { length } = report.window;
      const unseen = n === length ? hidden : 0; // the window begins where the text does
      const after = unseen ? `, after the hidden ${quoted(vocabulary[ids[0]])}` : "";
      const next = quoted(vocabulary[ids[n]]);
      $("read").textContent =
        `Characters read before ${next} (below): ${count(length - unseen)}${after}.`;
      view.clear();
      view.append(report.window.map((id) => ({ id })));
      $("attention").hidden = false;
      $("attention").setAttribute("aria-busy", false);
      draw();
      onLens(report.lens);
    });
  };
}

// Draw a row of attention weights as a strip; the largest weight is the darkest.
function strip(row) {
  const [made, width] = [element("div", { className: "strip" }), 100 / row.length];
  const most = row[argmax(row)];
  const stops = Array.from(row, (weight, i) => {
    const color = `rgb(var(--attended) / ${weight / most})`;
    return `${color} ${i * width}% ${(i + 1) * width}%`;
  });
  made.style.background = `linear-gradient(to right, ${stops})`;
  return made;
}

function showAbout({ about, config }, vocabulary) {
  const { loss, loss_step: lossStep, steps } = about;
  const names = vocabulary.map((c) => isolated(characterName(c)));
  const at = lossStep === steps ? "" : `, the lowest, at step ${count(lossStep)}`;
  const facts = {
    Text: [readable(about.text)],
    Parameters: [count(about.parameters)],
    Layers: [count(config.n_layer)],
    "Attention heads": [`${count(config.n_head)} in each layer`],
    "Embedding size": [count(config.n_embd)],
    Context: [`${count(config.block_size)} characters`],
    Vocabulary: [`${count(vocabulary.length)} characters: ${names.join(" ")}`],
    "Training steps": [count(steps)],
    "Validation loss": loss === null ? ["not measured"] : [lossOf(loss, 4), ` per character${at}`],
  };
  for (const [name, parts] of Object.entries(facts)) {
    $("facts").append(element("dt", { text: name }), element("dd", { translate: "no" }, parts));
  }
}

showPage();

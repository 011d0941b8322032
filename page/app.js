// The page and its worker, a second thread that runs the model. Both load model.js and this file.
"use strict";

const SLICE = 40; // milliseconds that the worker computes before it reads messages again
const MAX_SHOWN = 10000; // characters of a scored text; more make browsers slow
const TOLERANCE = 1e-3; // of the largest logit: more is not Python's model
const PACE = 20; // characters per second, while the page writes by itself
const SURPRISE = Math.log(10); // nats: a probability below 10 %

// ------------------------------------------------------------------------------------- the weights

// Decode base64 into one Float32Array per parameter; `shapes` is a list of [name, shape].
function decodeWeights(base64, shapes) {
  const { buffer } = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)); // little-endian
  const numbers = new Float32Array(buffer);
  let start = 0;
  return Object.fromEntries(
    shapes.map(([name, shape]) => {
      const size = shape.reduce((a, b) => a * b, 1);
      return [name, numbers.subarray(start, (start += size))];
    }),
  );
}

// -------------------------------------------------------------------------------------- the worker

// Answer the page's messages. Each message starts a job, and ends the previous job of that name.
function serve() {
  let [config, weights, model, writer, inspection] = [];
  const current = {};

  const jobs = {
    load({ base64, shapes, config: settings }) {
      [config, weights] = [settings, decodeWeights(base64, shapes)];
      jobs.heads({ off: [] });
    },

    // Switch heads off, and all others on. Jobs that run keep their model, but for `write`.
    heads({ off }) {
      model = new GPT(config, weights, off);
      writer = new Reader(model);
      inspection = { reader: new Reader(model), read: [], shares: [] };
    },

    // Judge the given characters from position `from` on, then draw more, up to position `end` or
    // the end of an answer, as fast as possible or, with `pace`, so many a second.
    async write({ ids, from, end, settings, pace, answer }, pause) {
      const [generator, given] = [new PCG64(settings.seed, 0), ids.length];
      let [items, drawing, done] = [[], 0, false];
      for (let n = from; !done; n++) {
        if (n === given) drawing = performance.now();
        const logits = writer.read(ids, n);
        if (n >= given) ids.push(sample(logits, settings, generator.random(n)));
        items.push({ id: ids[n], ...scoreCharacter(logits, ids[n]) });
        done = n + 1 >= end || (answer && n >= given && windowStartIn(ids, n + 1, config) === n);
        const paced = pace && n >= given;
        const slice = await pause(done || paced);
        if (!slice) continue;
        if (slice.stopped) return;
        const [drawn, seconds] = [Math.max(0, n + 1 - given), (performance.now() - drawing) / 1000];
        slice.report({ from: n + 1 - items.length, items, done, rate: pace ? 0 : drawn / seconds });
        items = [];
        if (paced) await new Promise((resolve) => setTimeout(resolve, 1000 / pace));
      }
    },

    // Compute what the model attended to before character n of ids, the heads' mean shares, and
    // what each layer would have predicted.
    async inspect({ ids, n }, pause) {
      const [start, { reader, read, shares }] = [windowStartIn(ids, n, config), inspection];
      const window = ids.slice(start, n);
      let known = 0;
      while (known < window.length - 1 && window[known] === read[known]) known++;
      read.length = shares.length = known;
      for (let position = known; position < window.length; position++) {
        reader.read(window, position + 1);
        const { attention } = reader.model;
        read.push(window[position]);
        shares.push(headShares(window, position, attention));
        const last = position + 1 === window.length;
        const now = last && { // before another job uses the model
          attention: attention.slice(),
          lens: reader.model.lens().map((logits) => scoreCharacter(logits, ids[n])),
        };
        const slice = await pause(last);
        if (!slice) continue;
        if (slice.stopped) return;
        if (!last) continue;
        const [previous, induction] = ["previous", "induction"].map((kind) =>
          meanShares(shares.map((each) => each[kind])),
        );
        slice.report({ window, ...now, previous, induction });
      }
    },

    // Compare the model in the page with the one in Python.
    async check({ check }, pause) {
      let largest = 0;
      for (const difference of differences(new GPT(config, weights), check)) {
        largest = Math.max(largest, difference); // stays NaN
        await pause(false);
      }
      const { report } = await pause(true);
      report({ difference: largest });
    },

    // Judge a text of which the characters that count are `counts`, all of them without `counts`.
    async score({ ids, starts, counts }, pause) {
      let [items, nats, counted] = [[], 0, 0];
      for (const [n, logits] of predictions(model, ids, starts)) {
        const counting = !counts || counts[n];
        const item = { id: ids[n], ...(counting && scoreCharacter(logits, ids[n])) };
        items.push(item);
        if (counting) [nats, counted] = [nats + item.nats, counted + 1];
        const done = n + 1 === ids.length;
        const slice = await pause(done);
        if (!slice) continue;
        if (slice.stopped) return;
        slice.report({ items, done, nats, counted });
        items = [];
      }
    },
  };

  // Return the function `pause(last)` of a job. Before the end of a slice of time, it returns null.
  // At the end, or if `last`, it lets messages in; then it returns whether they stopped the job,
  // and a function that reports to the page.
  function pauses(job, number) {
    let began = performance.now();
    const report = (result) => postMessage({ job, number, ...result });
    return async (last) => {
      if (!last && performance.now() - began < SLICE) return null;
      await new Promise((resolve) => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => resolve(port1.close());
        port2.postMessage(null);
      });
      began = performance.now();
      return { stopped: current[job] !== number, report };
    };
  }

  onmessage = ({ data }) => {
    const { job, number, stop } = data;
    current[job] = number;
    const fail = (error) => setTimeout(() => { throw error; }); // calls the page's worker.onerror
    if (!stop) jobs[job](data, pauses(job, number))?.catch(fail);
  };
}

// -------------------------------------------------------------------------------- text on the page

const $ = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const percent = (p) => `${(100 * p).toFixed(p < 0.001 ? 3 : 1)}\u00a0%`;

const NAMES = { "\n": "newline", "\t": "tab", " ": "space" };
const BLANK = /[\p{C}\p{M}\p{Z}\u115f\u1160\u2800\u3164\uffa0]/u; // one sees nothing of it
const OBEYED = /[\p{C}\u2028\u2029]/u; // controls, and what changes the direction of a text

// Return a character, or the name of one that cannot be seen (`character_name` in
// data/tokenizer.py).
const named = (c) => NAMES[c] || (BLANK.test(c) ? codePoint(c) : c);
const codePoint = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

// Return the name of a character in a sentence.
const quoted = (c) => (named(c) === c ? `‘${c}’` : named(c));

// Return a character as it stands in a text: joiners and marks do their work there.
const inText = (c) => (OBEYED.test(c) && !"\n\t\u200c\u200d".includes(c) ? codePoint(c) : c);
const readable = (text) => Array.from(text, inText).join("");

function element(name, { className = "", text = "", ...attributes } = {}, children = []) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Return a loss in nats, with a note, which opens on focus too.
function lossOf(nats, digits, more = "") {
  const note =
    `${(nats / Math.LN2).toFixed(digits)} bits. A loss of 0 is certainty; each nat more is ` +
    `2.7 times less likely.${more}`;
  const text = `${nats.toFixed(digits)} nats`;
  return element("span", { text, tabindex: 0, "data-note": note });
}

// A text on the page, one element per character, colored by loss. An item has the id of a character
// and the result of `scoreCharacter`. Pointing at a character shows its item; a click or the arrow
// keys select it, and a click brings `panel`, which explains it, into view. Each line is an element
// too: it has a direction of its own, and the browser lays out only the lines that change.
class TextView {
  constructor(box, vocabulary, { onShow = () => {}, onSelect = () => {}, panel } = {}) {
    Object.assign(this, { box, vocabulary, onShow, onSelect });
    this.clear();
    box.addEventListener("pointerover", ({ target }) => {
      const i = this.spans.indexOf(target);
      if (this.selected === null && i >= 0) onShow(i);
    });
    box.addEventListener("click", ({ target }) => {
      const i = this.spans.indexOf(target);
      if (i >= 0) this.select(i);
      if (i >= 0 && this.selected === i) panel?.scrollIntoView({ block: "nearest" });
    });
    box.addEventListener("keydown", (event) => this.move(event));
    box.addEventListener("scroll", () => {
      this.atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
    });
  }

  clear() {
    [this.items, this.spans] = [[], []];
    [this.selected, this.windowStart, this.atEnd] = [null, 0, true]; // atEnd: scroll with new text
    this.box.replaceChildren();
  }

  // Items without a loss are not colored. With `hidden`, the characters are not shown.
  append(items, { given = false, hidden = false } = {}) {
    const { box, spans } = this;
    for (const item of items) {
      const character = this.vocabulary[item.id];
      const span = element("span", { text: inText(character), className: given ? "given" : "" });
      span.hidden = hidden;
      span.classList.toggle("newline", character === "\n");
      span.classList.toggle("name", span.textContent !== character);
      const last = spans.at(-1);
      const line = last?.textContent === "\n" ? null : last?.parentElement;
      if (line) line.append(span);
      else box.append(element("div", { dir: "auto" }, [span]));
      spans.push(span);
      this.update(spans.length - 1, item);
    }
    if (this.atEnd) box.scrollTop = box.scrollHeight;
  }

  // Show item i as it is now: colored by its loss.
  update(i, item) {
    this.items[i] = item;
    if (item.nats !== undefined) this.spans[i].style.setProperty("--loss", item.nats.toFixed(3));
  }

  truncate(length) {
    this.items.length = length;
    for (const span of this.spans.splice(length)) {
      const line = span.parentElement;
      span.remove();
      if (!line.firstChild) line.remove();
    }
  }

  // Mark the start of the model's window, and the characters before it.
  markWindow(start) {
    const { spans, windowStart: before } = this;
    for (const span of spans.slice(Math.min(start, before), Math.max(start, before))) {
      span.classList.toggle("before-window", start > before);
    }
    spans[before]?.classList.remove("window-start");
    spans[start]?.classList.toggle("window-start", start > 0);
    this.windowStart = start;
  }

  // Select character i, or deselect it if it is selected.
  select(i) {
    const { spans } = this;
    spans[this.selected]?.classList.remove("selected");
    this.selected = i === this.selected ? null : i;
    if (this.selected === null) return;
    spans[i].classList.add("selected");
    this.reveal(i);
    this.onShow(i);
    this.onSelect(i);
  }

  // Scroll the box until character i is in view.
  reveal(i) {
    const [outer, inner] = [this.box, this.spans[i]].map((each) => each.getBoundingClientRect());
    if (inner.top >= outer.top && inner.bottom <= outer.bottom) return;
    this.box.scrollTop += inner.top - outer.top - this.box.clientHeight / 2;
  }

  // Select the character that an arrow key, Home or End leads to; Escape deselects.
  move(event) {
    const [{ spans, selected: at }, { key }] = [this, event];
    if (key === "Escape" && at !== null) this.select(at);
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(key) || !spans.length) return;
    event.preventDefault();
    const last = spans.length - 1;
    const target = { Home: 0, End: last }[key] ?? (at === null ? last : this.beside(at, key));
    if (target !== at && spans[target] && !spans[target].hidden) this.select(target);
  }

  // Return the position that one sees beside character i, in the direction of an arrow key.
  beside(i, key) {
    const place = (j) => this.spans[j].getBoundingClientRect();
    const center = (j) => (place(j).left + place(j).right) / 2;
    const row = this.row(i);
    if (key === "ArrowUp" || key === "ArrowDown") {
      const end = key === "ArrowUp" ? row[0] - 1 : row.at(-1) + 1;
      if (!this.spans[end]) return i;
      const distance = (j) => Math.abs(place(j).left - place(i).left);
      return this.row(end).reduce((best, j) => (distance(j) < distance(best) ? j : best));
    }
    const leftward = getComputedStyle(this.spans[i].parentElement).direction === "rtl";
    const seen = [...row].sort((a, b) => center(a) - center(b) || (leftward ? b - a : a - b));
    const next = seen[seen.indexOf(i) + (key === "ArrowRight" ? 1 : -1)];
    if (next !== undefined) return next;
    return (key === "ArrowRight") === leftward ? row[0] - 1 : row.at(-1) + 1;
  }

  // Return the positions of the characters that one sees in a row with character i.
  row(i) {
    const place = (j) => this.spans[j].getBoundingClientRect();
    const { top, height } = place(i);
    const inRow = (j) => {
      return this.spans[j] && !this.spans[j].hidden && Math.abs(place(j).top - top) < height / 2;
    };
    const row = [i];
    while (inRow(row[0] - 1)) row.unshift(row[0] - 1);
    while (inRow(row.at(-1) + 1)) row.push(row.at(-1) + 1);
    return row;
  }
}

// Show the likeliest characters at the position of an item, and the character that was taken.
// Choosing a different one calls `choose(id)`; without `choose`, none can be.
function showWhy(panel, vocabulary, item, choose) {
  const name = quoted(vocabulary[item.id]);
  if (item.nats === undefined) {
    return panel.replaceChildren(`${name} was given: the model did not predict it.`);
  }
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
      element("span", { text: named(vocabulary[id]) }),
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
        text: { "\n": "↵", " ": "␣", "\t": "⇥" }[character] || named(character),
        title: `${named(character)}: ${percent(share)}`,
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

// Return the ids of characters, or show which are unknown, with a button to remove them.
function encode(characters, field, message, ids) {
  const unknown = new Set(characters.filter((c) => !ids.has(c)));
  message.hidden = !unknown.size;
  if (!unknown.size) return characters.map((c) => ids.get(c));
  const more = unknown.size > 5 ? ` and ${count(unknown.size - 5)} more` : "";
  const name = (c) => (named(c) === c ? `${quoted(c)} (${codePoint(c)})` : named(c));
  const remove = element("button", { text: unknown.size > 1 ? "Remove them" : "Remove it" });
  remove.addEventListener("click", () => {
    field.value = Array.from(field.value).filter((c) => ids.has(c)).join("");
    message.hidden = true;
    field.dispatchEvent(new Event("input"));
    field.focus();
  });
  const names = Array.from(unknown).slice(0, 5).map(name).join(", ");
  message.replaceChildren(`The model has never read ${names}${more}. `, remove);
  return null;
}

// Start the worker. Return `ask(job, message, answer)`, which starts a job and ends the previous
// one of the same name; `answer` is called with each report of the job.
function startWorker(failed) {
  const code = $("model-code").textContent + $("app-code").textContent;
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const worker = new Worker(url);
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
  const data = JSON.parse($("data").textContent);
  const vocabulary = Array.from(data.vocabulary);
  const ids = new Map(vocabulary.map((c, id) => [c, id]));
  const fail = (text) => {
    $("failure").textContent = text;
    $("failure").hidden = false;
  };
  const ask = startWorker((reason) => fail(`page/model.js cannot run this model: ${reason}.`));
  const { shapes, config } = data;
  ask("load", { base64: $("weights").textContent, shapes, config });
  $("weights").remove();

  $("title").textContent = readable(data.about.text);
  document.title = `${readable(data.about.text)}: a GPT in a page`;
  const heads = showHeads(ask, config);
  const inspect = showAttention(ask, vocabulary, config, heads);
  showWrite(ask, vocabulary, ids, data, inspect, heads);
  showScore(ask, vocabulary, ids, data, heads);
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
      const [n, label] = [layer * H + head, `layer ${layer + 1} head ${head + 1}`];
      const attributes = { "aria-label": label, "aria-pressed": true };
      const button = element("button", { text: head + 1, ...attributes });
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
  const { separator = [] } = config;
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
  const start = separator.at(-1) ?? ids.get("\n") ?? ids.get(" ") ?? 0;
  let [writing, prompt, given, end, rate, shown] = [false, null, 0, 0, 0, null];
  let alive = true; // the page writes by itself, until the reader takes over
  let before = null; // the losses of the text until all is judged again with other heads

  const why = (i) => {
    shown = i;
    showWhy($("why"), vocabulary, view.items[i], i > 0 ? (id) => replace(i, id) : undefined);
    $("inside").hidden = i === 0 || i !== view.selected;
  };
  const look = (i) => {
    inspect(view.items.map(({ id }) => id), i, (lens) => {
      showLens(vocabulary, lens, view.items[i].id);
    });
  };

  const options = { onShow: why, onSelect: look, panel: $("why") };
  const view = new TextView($("text"), vocabulary, options);

  const settings = () => {
    const wrong = names.find((name) => !$(name).checkValidity());
    if (!wrong) return Object.fromEntries(names.map((name) => [name, Number($(name).value)]));
    $("settings").open = true;
    $(wrong).reportValidity();
    return null;
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
    const value = $("prompt").value;
    const text = encode(Array.from(value), $("prompt"), $("prompt-error"), ids);
    if (!text) return false;
    if (answers && !value.includes(items.answer_after)) {
      $("prompt-error").textContent = `A question ends with “${readable(items.answer_after)}”.`;
      $("prompt-error").hidden = false;
      return false;
    }
    clear();
    prompt = value;
    const started = text.length && !separator.length;
    view.append(started ? [] : [{ id: start }], { given: true, hidden: true });
    view.append(text.map((id) => ({ id })), { given: true });
    given = end = view.items.length;
    return true;
  };

  // Judge the characters that the present heads have not judged, then write up to position `until`.
  const write = (until, pace = 0) => {
    const chosen = settings();
    if (!chosen) return;
    const text = view.items.map(({ id }) => id);
    const judged = view.items.map(({ nats }) => nats !== undefined);
    const first = judged.indexOf(true);
    let from = answers ? given : windowStartIn(text, text.length, config) + 1; // no question
    if (first >= 0) from = before ? first : judged.lastIndexOf(true) + 1;
    writing = until > text.length;
    const message = { ids: text, from, end: until, settings: chosen, pace, answer: answers };
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

  // Select the first character drawn with a low probability; at the end of the text, the lowest.
  const selectSurprise = () => {
    const losses = view.items.map(({ nats }, i) => (i < given ? 0 : nats));
    const first = losses.findIndex((nats) => nats > SURPRISE);
    if (first >= 0) view.select(first);
    else if (!writing) view.select(argmax(losses));
  };

  const takeOver = ({ target }) => {
    if (alive && writing && !$("write").contains(target)) pause(); // its own click pauses or writes
    alive = false;
  };
  for (const event of ["click", "keydown"]) document.addEventListener(event, takeOver, true);

  // Replace character i by a different one and continue the text from there.
  const replace = (i, id) => {
    const { top } = view.items[i];
    const rank = top.findIndex(([other]) => other === id) + 1;
    view.truncate(i);
    before?.splice(i);
    view.append([{ id, top, rank, nats: -Math.log(top[rank - 1][1]) }]);
    view.selected = null;
    view.select(i);
    view.box.focus({ preventScroll: true }); // the button that was chosen is gone
    if (end <= i + 1) end = i + 1 + Number($("max_new_tokens").value);
    write(end);
  };

  // Say how the losses have changed with the heads, and which has changed most.
  const sayChange = () => {
    const judged = Array.from(before.keys()).filter((i) => before[i] !== undefined);
    const difference = (i) => Math.abs(view.items[i].nats - before[i]);
    const mean = (loss) => judged.reduce((sum, i) => sum + loss(i), 0) / judged.length;
    const [was, is] = [mean((i) => before[i]), mean((i) => view.items[i].nats)];
    const most = judged.reduce((best, i) => (difference(i) > difference(best) ? i : best));
    const around = view.items.slice(Math.max(0, most - 12), most).map(({ id }) => vocabulary[id]);
    const name = quoted(vocabulary[view.items[most].id]);
    const text = `${name} after “\u2068${readable(around)}\u2069”`; // isolates its direction
    const button = element("button", { text });
    button.addEventListener("click", () => view.selected === most || view.select(most));
    const [p, now] = [before[most], view.items[most].nats].map((nats) => percent(Math.exp(-nats)));
    $("effect").replaceChildren(
      `Mean loss: ${was.toFixed(4)} → ${is.toFixed(4)} nats. Changed most: `,
      button, `: ${p} → ${now}.`,
    );
    before = null;
  };

  heads.changed = () => {
    before ||= view.items.map(({ nats }) => nats);
    $("effect").textContent = "The text is read again.";
    if (view.selected !== null) look(view.selected);
    write(writing ? end : view.items.length);
  };

  // Whether a click on the button begins a new text: with another prompt, or after an answer.
  const afresh = () => prompt !== $("prompt").value || (answers && view.items.length > given);
  const proceed = () => {
    if (writing) return pause();
    if (afresh() && !begin()) return update();
    if (view.items.length >= end) end = view.items.length + Number($("max_new_tokens").value);
    write(end);
  };
  $("write").addEventListener("click", proceed);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || items?.separator !== "\n") return; // the prompt is one line
    event.preventDefault();
    if (writing) pause();
    proceed();
  });
  $("step").addEventListener("click", () => {
    if (prompt !== $("prompt").value && !begin()) return update();
    write(view.items.length + 1);
  });
  $("restart").addEventListener("click", () => {
    clear();
    pause();
  });
  $("copy").addEventListener("click", async () => {
    const text = view.items.filter((_, i) => !view.spans[i].hidden);
    try {
      await navigator.clipboard.writeText(text.map(({ id }) => vocabulary[id]).join(""));
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
    const start = windowStartIn(written.map(({ id }) => id), written.length, config);
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
      `${count(written.length)} characters${speed} · mean loss `,
      lossOf(mean, 4, " The stronger its color, the higher the loss of a character."),
    );
  };
  update();
  if (!begin()) return;
  end += Number($("max_new_tokens").value);
  write(end, matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : PACE);
}

// Return `inspect(ids, n, onLens)`, which shows what the model attended to when it predicted
// character n, and calls `onLens` with what each layer would have predicted.
function showAttention(ask, vocabulary, config, heads) {
  const { n_layer: layers, n_head: H } = config;
  let [result, head] = [null, 0];
  for (let i = 0; i < layers; i++) $("layer").append(element("option", { text: i + 1, value: i }));
  $("layer").value = layers - 1;
  $("layer").addEventListener("change", () => draw());
  const view = new TextView($("window"), vocabulary, { onSelect: (i) => view.select(i) });

  const draw = () => {
    const { window, attention, previous, induction } = result;
    const first = Number($("layer").value) * H; // head of the layer
    const row = attention[first + head];
    const most = argmax(row);
    $("most").textContent = `most to ${quoted(vocabulary[window[most]])}, ${percent(row[most])}`;
    $("shown").textContent = head + 1;
    row.forEach((weight, i) => {
      view.spans[i].style.setProperty("--weight", weight / row[most]);
      view.spans[i].title = percent(weight);
    });
    const share = (means, n) => {
      return means ? `${percent(means.heads[n])} (${percent(means.uniform)})` : "none here";
    };
    const rows = Array.from({ length: H }, (_, h) => {
      const [n, label] = [first + h, `Show head ${h + 1}`];
      const attributes = { "aria-label": label, "aria-pressed": h === head };
      const button = element("button", { text: h + 1, ...attributes });
      button.addEventListener("click", () => {
        head = h;
        draw();
        $("heads").querySelectorAll("button")[h].focus({ preventScroll: true });
      });
      return element("tr", { className: heads.off.has(n) ? "off" : "" }, [
        element("td", {}, [button]),
        element("td", {}, [strip(attention[n])]),
        element("td", { text: share(previous, n) }),
        element("td", { text: share(induction, n) }),
      ]);
    });
    $("heads").replaceChildren(...rows);
  };

  return (ids, n, onLens) => {
    if (!n) {
      ask("inspect", { stop: true });
      return ($("attention").hidden = true); // it was not predicted
    }
    $("attention").setAttribute("aria-busy", true);
    ask("inspect", { ids: ids.slice(0, n + 1), n }, (report) => {
      result = report;
      const length = count(report.window.length);
      $("read").textContent = `Characters read before ${quoted(vocabulary[ids[n]])}: ${length}.`;
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
  const stops = Array.from(row, (weight, i) => {
    const color = `rgb(var(--attended) / ${weight / row[argmax(row)]})`;
    return `${color} ${i * width}% ${(i + 1) * width}%`;
  });
  made.style.background = `linear-gradient(to right, ${stops})`;
  return made;
}

function showScore(ask, vocabulary, ids, { items: list, unknown }, { off }) {
  let running = false;
  const view = new TextView($("scored"), vocabulary, {
    onShow: (i) => showWhy($("score-why"), vocabulary, view.items[i]),
    panel: $("score-why"),
  });
  const finish = (...result) => {
    running = false;
    $("score-result").setAttribute("aria-busy", false);
    $("score").textContent = "Score";
    $("score-result").replaceChildren(...result);
  };
  $("score-text").addEventListener("input", () => ($("score-error").hidden = true));
  $("score").addEventListener("click", () => {
    if (running) {
      ask("score", { stop: true });
      return finish("Cancelled.");
    }
    const field = $("score-text");
    const { characters, starts, counts } = list
      ? layOut(field.value, list)
      : { characters: Array.from(field.value) };
    const known = unknown ? characters.map((c) => (ids.has(c) ? c : unknown)) : characters;
    const text = encode(known, field, $("score-error"), ids);
    if (!text) return;
    view.clear();
    $("score-why").replaceChildren();
    $("scored").hidden = text.length < 2;
    if (text.length < 2) return finish("At least 2 characters are needed.");
    running = true;
    $("score-result").setAttribute("aria-busy", true); // read out when it is complete
    $("score").textContent = "Cancel";
    view.append([{ id: text[0] }], { given: true, hidden: Boolean(list) });
    const without = off.size ? `, with ${off.size} head${off.size > 1 ? "s" : ""} off` : "";
    ask("score", { ids: text, starts, counts }, ({ items, done, nats, counted }) => {
      view.append(items.slice(0, Math.max(0, MAX_SHOWN - view.items.length)));
      if (!counted) return done && finish("There is no answer in it.");
      const part = text.length > MAX_SHOWN ? `; only the first ${count(MAX_SHOWN)} are shown` : "";
      const rest = ` per character, over ${count(counted)} predictions${without}`;
      if (done) finish(lossOf(nats / counted, 4), rest + part);
      else $("score-result").replaceChildren(lossOf(nats / counted, 4), `${rest} so far`);
    });
  });
}

function showAbout({ about, config }, vocabulary) {
  const { loss, loss_step: lossStep, steps } = about;
  const at = lossStep === steps ? "" : `, the lowest, at step ${count(lossStep)}`;
  const facts = {
    Text: [readable(about.text)],
    Parameters: [count(about.parameters)],
    Layers: [count(config.n_layer)],
    "Attention heads": [`${count(config.n_head)} in each layer`],
    "Embedding size": [count(config.n_embd)],
    Context: [`${count(config.block_size)} characters`],
    Vocabulary: [`${count(vocabulary.length)} characters: ${vocabulary.map(named).join(" ")}`],
    "Training steps": [count(steps)],
    "Validation loss": loss === null ? ["not measured"] : [lossOf(loss, 4), ` per character${at}`],
  };
  for (const [name, parts] of Object.entries(facts)) {
    $("facts").append(element("dt", { text: name }), element("dd", {}, parts));
  }
}

if (typeof document !== "undefined") showPage();
else if (typeof WorkerGlobalScope !== "undefined") serve();

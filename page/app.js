// The page and its worker, a second thread that runs the model. Both load model.js and this file.
"use strict";

const SLICE = 40; // milliseconds that the worker computes before it reads messages again
const MAX_SHOWN = 10000; // characters of a scored text; more make browsers slow
const TOLERANCE = 1e-3; // of the largest logit: more is not Python's model
const PACE = 20; // characters per second, while the page writes by itself
const SURPRISE = Math.log(10); // nats: a probability below 10 %
const BITS_PER_NAT = 1 / Math.LN2;
// A head is named after a pattern that gets on average this share of its attention, and this many
// times the share that uniform attention would give.
const HEAD_SHARE = 0.2;
const HEAD_FACTOR = 4;

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

    // Judge the given characters from position `from` on, then draw more up to position `end`, as
    // fast as possible or, with `pace`, so many a second.
    async write({ ids, from, end, settings, pace }, pause) {
      const [generator, given] = [new PCG64(settings.seed, 0), ids.length];
      let [items, drawing] = [[], 0];
      for (let n = from; n < end; n++) {
        if (n === given) drawing = performance.now();
        const logits = writer.read(ids, n);
        if (n >= given) ids.push(sample(logits, settings, generator.random(n)));
        items.push({ id: ids[n], ...scoreCharacter(logits, ids[n]) });
        const paced = pace && n >= given;
        const slice = await pause(n + 1 === end || paced);
        if (!slice) continue;
        if (slice.stopped) return;
        const [drawn, seconds] = [Math.max(0, n + 1 - given), (performance.now() - drawing) / 1000];
        slice.report({ from: n + 1 - items.length, items, rate: pace ? 0 : drawn / seconds });
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
        const result = last && { // before another job uses the model
          attention: attention.slice(),
          lens: reader.model.lens().map((logits) => scoreCharacter(logits, ids[n])),
        };
        const slice = await pause(last);
        if (!slice) continue;
        if (slice.stopped) return;
        if (!last) slice.report({ done: position + 1, of: window.length });
        else {
          const [previous, induction] = ["previous", "induction"].map((kind) =>
            meanShares(shares.map((each) => each[kind])),
          );
          slice.report({ n, start, window, ...result, previous, induction });
        }
      }
    },

    // Judge parts of a text again; `spans` has their [from, end], the most urgent first.
    async judge({ ids, spans }, pause) {
      for (const [from, end] of spans) {
        let items = [];
        for (const [n, logits] of rereadings(model, ids, from, end)) {
          if (logits) items.push({ position: n, id: ids[n], ...scoreCharacter(logits, ids[n]) });
          const slice = await pause(n + 1 === end);
          if (!slice) continue;
          if (slice.stopped) return;
          slice.report({ items, done: logits && n + 1 === spans.at(-1)[1] });
          items = [];
        }
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

    async score({ ids }, pause) {
      let [items, nats] = [[], 0];
      for (const [position, logits] of predictions(model, ids)) {
        const item = { id: ids[position], ...scoreCharacter(logits, ids[position]) };
        nats += item.nats;
        items.push(item);
        const slice = await pause(position + 1 === ids.length);
        if (!slice) continue;
        if (slice.stopped) return;
        slice.report({ from: position + 1 - items.length, items, done: position, nats });
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

// Escape control, bidirectional, surrogate and unassigned characters, as common/errors.py does.
function escaped(character) {
  if (!/[\p{C}\u2028\u2029]/u.test(character) || /[\u200c\u200d]/.test(character)) return character;
  const short = { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[character];
  const code = character.codePointAt(0).toString(16);
  const long = code.length > 4 ? `\\U${code.padStart(8, "0")}` : `\\u${code.padStart(4, "0")}`;
  return short || (code.length < 3 ? `\\x${code.padStart(2, "0")}` : long);
}

const NAMES = { "\n": "newline", " ": "space", "\t": "tab" };

// Return the name of a character in a list, and in a sentence.
const named = (character) => NAMES[character] || escaped(character);
const quoted = (character) => NAMES[character] || `‘${escaped(character)}’`;

function describe(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  return `${quoted(character)} (U+${code})`;
}

function element(name, { className = "", text = "", ...attributes } = {}, children = []) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function lossText(nats) {
  return `${nats.toFixed(4)} nats, ${(nats * BITS_PER_NAT).toFixed(4)} bits`;
}

// A text on the page, one element per character, colored by loss. An item has the id of a character
// and the result of `scoreCharacter`. Pointing at a character shows its item; a click or the arrow
// keys select it, and a click brings `panel`, which explains it, into view. Each line is an element
// too, so that the browser lays out only the lines that change.
class TextView {
  constructor(box, vocabulary, { onShow = () => {}, onSelect = () => {}, panel } = {}) {
    Object.assign(this, { box, vocabulary, onShow, onSelect });
    this.clear();
    box.addEventListener("pointerover", ({ target }) => {
      if (this.selected === null && this.positions.has(target)) onShow(this.positions.get(target));
    });
    box.addEventListener("click", ({ target }) => {
      if (!this.positions.has(target)) return;
      this.select(this.positions.get(target));
      if (this.selected !== null) panel?.scrollIntoView({ block: "nearest" });
    });
    box.addEventListener("keydown", (event) => this.move(event));
    box.addEventListener("scroll", () => {
      this.atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
    });
  }

  clear() {
    [this.items, this.spans, this.positions] = [[], [], new Map()]; // positions: span -> position
    [this.selected, this.windowStart, this.atEnd] = [null, 0, true]; // atEnd: scroll with new text
    this.box.replaceChildren();
  }

  // Items without a loss are not colored. With `hidden`, the characters are not shown.
  append(items, { given = false, hidden = false } = {}) {
    const { box, spans } = this;
    for (const item of items) {
      const character = this.vocabulary[item.id];
      const span = element("span", {
        text: "\n\t".includes(character) ? character : escaped(character),
        className: given ? "given" : "",
      });
      span.hidden = hidden;
      span.classList.toggle("newline", character === "\n");
      span.classList.toggle("escaped", span.textContent !== character);
      const last = spans.at(-1);
      const line = last?.textContent === "\n" ? null : last?.parentElement;
      if (line) line.append(span);
      else box.append(element("div", {}, [span]));
      this.positions.set(span, spans.length);
      spans.push(span);
      this.scoreCharacter(spans.length - 1, item);
    }
    if (this.atEnd) this.frame ||= requestAnimationFrame(() => this.scrollToEnd());
  }

  // Color a character by its loss.
  scoreCharacter(i, item) {
    const { classList } = this.spans[i];
    if (this.items[i]?.nats !== undefined) classList.remove(`n${level(this.items[i].nats)}`);
    this.items[i] = item;
    if (item.nats !== undefined) classList.add(`n${level(item.nats)}`);
  }

  // Return the positions of the characters in view: from the first to before the end.
  visible() {
    const { top, bottom } = this.box.getBoundingClientRect();
    const places = this.spans.map((span) => span.getBoundingClientRect());
    return [
      Math.max(0, places.findIndex((place) => place.bottom > top)),
      1 + places.findLastIndex((place) => place.top < bottom),
    ];
  }

  scrollToEnd() {
    this.frame = null;
    this.box.scrollTop = this.box.scrollHeight;
  }

  truncate(length) {
    this.items.length = length;
    for (const span of this.spans.splice(length)) {
      const line = span.parentElement;
      this.positions.delete(span);
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
    const { box, spans } = this;
    spans[this.selected]?.classList.remove("selected");
    this.selected = i === this.selected ? null : i;
    if (this.selected === null) return;
    spans[i].classList.add("selected");
    const [outer, inner] = [box.getBoundingClientRect(), spans[i].getBoundingClientRect()];
    if (inner.top < outer.top || inner.bottom > outer.bottom) {
      box.scrollTop += inner.top - outer.top - box.clientHeight / 2;
    }
    this.onShow(i);
    this.onSelect(i);
  }

  move(event) {
    const [at, last] = [this.selected, this.items.length - 1];
    const targets = {
      ArrowLeft: at === null ? last : at - 1,
      ArrowRight: at === null ? last : at + 1,
      ArrowUp: this.lineFrom(at, -1),
      ArrowDown: this.lineFrom(at, 1),
      Home: 0,
      End: last,
      Escape: at,
    };
    if (!(event.key in targets) || last < 0) return;
    event.preventDefault();
    const target = Math.min(last, targets[event.key] ?? last);
    if (event.key === "Escape" ? at === null : target === at) return;
    if (target >= 0 && !this.spans[target].hidden) this.select(target);
  }

  // Return the position of the nearest character one line above (-1) or below (1); else i itself.
  lineFrom(i, direction) {
    if (i === null) return null;
    const rectangle = (j) => this.spans[j].getBoundingClientRect();
    const here = rectangle(i);
    let [nearest, least] = [i, Infinity];
    for (let j = i + direction; j >= 0 && j < this.spans.length; j += direction) {
      const { top, left } = rectangle(j);
      const lines = Math.round(((top - here.top) * direction) / here.height);
      if (lines > 1) break;
      if (lines === 1 && Math.abs(left - here.left) < least) {
        [nearest, least] = [j, Math.abs(left - here.left)];
      }
    }
    return nearest;
  }
}

const level = (nats) => Math.min(7, Math.floor(nats));

// Show the likeliest characters at the position of an item, and the character that was taken.
// Choosing a different one calls `choose(id)`; without `choose`, none can be. `note` is on how the
// text was drawn.
function showWhy(panel, vocabulary, item, choose, note = "") {
  const heading = element("p", { text: `${describe(vocabulary[item.id])}: ` });
  if (item.nats === undefined) {
    heading.append("no prediction of this character was computed.");
    panel.replaceChildren(heading);
    return;
  }
  const p = Math.exp(-item.nats);
  const [nats, bits] = [item.nats.toFixed(2), (item.nats * BITS_PER_NAT).toFixed(2)];
  heading.append(`probability ${percent(p)}, loss ${nats} nats (${bits} bits).`);
  const rows = item.top.map(([id, share], i) => ({ id, share, rank: i + 1 }));
  if (!rows.some(({ id }) => id === item.id)) rows.push({ id: item.id, share: p, rank: item.rank });
  const list = rows.map(({ id, share, rank }) => {
    const taken = id === item.id;
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    const button = element("button", { className: taken ? "taken" : "" }, [
      element("span", { className: "name", text: named(vocabulary[id]) }),
      element("span", { className: "bar", "aria-hidden": "true" }, [bar]),
      element("span", { className: "share", text: percent(share) }),
    ]);
    button.disabled = taken || !choose;
    if (taken) button.title = `taken; rank ${rank} by probability`;
    button.addEventListener("click", () => choose(id));
    return element("li", {}, [button]);
  });
  const [most, last] = [Math.min(item.top.length, vocabulary.length), rows.length];
  const taken = last > most ? `; below them the one taken, rank ${count(item.rank)}` : "";
  const offer = choose ? " Choose a different one to continue the text from there." : "";
  const hint = element("p", {
    className: "hint",
    text: `The ${most} likeliest characters at this position${taken}.${offer}${note}`,
  });
  panel.replaceChildren(heading, element("ol", {}, list), hint);
}

// Show the likeliest next characters after each layer, and the probability of the one taken there.
function showLens(panel, vocabulary, lens, id) {
  const likeliest = lens.at(-1).top[0][0];
  const settled = 1 + lens.findLastIndex(({ top }) => top[0][0] !== likeliest);
  const rows = lens.map(({ nats, top }, layer) => {
    const chips = top.map(([other, share]) => {
      const character = vocabulary[other];
      const chip = element("span", {
        className: other === id ? "taken" : "",
        text: { "\n": "↵", " ": "␣", "\t": "⇥" }[character] || escaped(character),
        title: `${named(character)}: ${percent(share)}`,
      });
      chip.append(element("small", { text: `${Math.round(100 * share)}\u00a0%` }));
      chip.style.setProperty("--share", Math.sqrt(share)); // small ones can be told apart
      return chip;
    });
    return element("tr", {}, [
      element("th", { scope: "row", text: layer + 1 }),
      element("td", {}, chips),
      element("td", { text: percent(Math.exp(-nats)) }),
    ]);
  });
  const head = ["Layer", "Likeliest next", quoted(vocabulary[id])];
  const columns = head.map((text) => element("th", { scope: "col", text }));
  const mind = quoted(vocabulary[likeliest]).replace(/^./, (letter) => letter.toUpperCase());
  const from = settled ? `from layer ${settled + 1} of ${lens.length} on` : "after every layer";
  panel.replaceChildren(
    element("p", { text: `${mind} is the likeliest ${from}.` }),
    element("table", {}, [
      element("thead", {}, [element("tr", {}, columns)]),
      element("tbody", {}, rows),
    ]),
    element("p", {
      className: "hint",
      text:
        "Each row shows what the model would predict if it ended after that layer (the logit " +
        "lens); the last row is the whole model. The last column is the character that was taken.",
    }),
  );
}

// Return the ids of a text, or show which characters are unknown, with a button to remove them.
function encode(field, message, ids) {
  const characters = Array.from(field.value);
  const unknown = characters.filter((c) => !ids.has(c));
  message.hidden = !unknown.length;
  if (!unknown.length) return characters.map((c) => ids.get(c));
  const distinct = Array.from(new Set(unknown));
  const more = distinct.length > 5 ? ` and ${count(distinct.length - 5)} more` : "";
  const names = distinct.slice(0, 5).map(describe).join(", ");
  const remove = element("button", { text: unknown.length > 1 ? "Remove them" : "Remove it" });
  remove.addEventListener("click", () => {
    field.value = characters.filter((c) => ids.has(c)).join("");
    message.hidden = true;
    field.dispatchEvent(new Event("input"));
    field.focus();
  });
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

  $("title").textContent = escapedText(data.about.text);
  document.title = `${escapedText(data.about.text)}: a GPT in a page`;
  for (const legend of document.querySelectorAll(".legend")) {
    const labels = ["0 nats", "1", "2", "3", "4", "5", "6", "7 and more"];
    legend.append(...labels.map((text, n) => element("span", { className: `n${n}`, text })));
  }
  // Say if this is not Python's model. It runs after the first characters, which should not wait.
  const check = () =>
    ask("check", { check: data.check }, ({ difference }) => {
      if (difference <= TOLERANCE) return;
      fail(
        "This page is not the model that was trained: its logits differ from Python's by up to " +
          `${percent(difference)} of the largest. page/model.js must compute what model/gpt.py does.`,
      );
    });
  const heads = showHeads(ask, config);
  const inspect = showAttention(ask, vocabulary, config, heads);
  showWrite(ask, vocabulary, ids, data, { inspect, check, heads });
  showScore(ask, vocabulary, ids, heads);
  showAbout(data, vocabulary);
  document.querySelector("main").hidden = false;
}

const escapedText = (text) => Array.from(text, escaped).join("");

// Return the heads that are switched off: `off` has them as layer * H + head. `toggle(n)` switches
// one; then each function in `changed` is called. `say(...)` shows what has changed.
function showHeads(ask, { n_head: H }) {
  const heads = { off: new Set(), changed: [] };
  const apply = () => {
    const names = Array.from(heads.off).sort((a, b) => a - b);
    $("heads-off").hidden = !names.length;
    $("off-names").textContent = `Switched off: ${names.map((n) => headName(n, H)).join(", ")}.`;
    heads.say("The text is read again.");
    ask("heads", { off: names });
    for (const call of heads.changed) call();
  };
  heads.toggle = (n) => {
    if (!heads.off.delete(n)) heads.off.add(n);
    apply();
  };
  heads.say = (...parts) => $("off-effect").replaceChildren(...parts);
  $("all-on").addEventListener("click", () => {
    heads.off.clear();
    apply();
    $("text").focus({ preventScroll: true }); // the button is gone
  });
  return heads;
}

const headName = (n, H) => `layer ${Math.floor(n / H) + 1} head ${(n % H) + 1}`;

function showWrite(ask, vocabulary, ids, data, { inspect, check, heads }) {
  const { separator = [] } = data.config;
  const names = Object.keys(data.settings);
  for (const name of names) $(name).value = data.settings[name];
  $("prompt").value = data.prompt;
  // With an empty prompt, the text starts after a hidden newline (else a space, else id 0); in a
  // list, always after the end of an item.
  const start = separator.at(-1) ?? ids.get("\n") ?? ids.get(" ") ?? 0;
  let [writing, prompt, given, end, rate, shown, checked] = [false, null, 0, 0, 0, null, false];
  let alive = true; // the page writes by itself, until the reader takes over
  let before = null; // the losses of the text until all is judged again with other heads
  let waiting = false; // for the selected character, which is judged first
  let note = ""; // on how the text was drawn

  const why = (i) => {
    shown = i;
    showWhy($("why"), vocabulary, view.items[i], i > 0 ? (id) => replace(i, id) : undefined, note);
    $("lens").hidden = i === 0 || i !== view.selected;
  };
  const look = (i) => {
    $("lens").setAttribute("aria-busy", true);
    inspect(view.items.map(({ id }) => id), i, (lens) => {
      const [item, now] = [view.items[i], lens.at(-1)];
      showLens($("lens-rows"), vocabulary, lens, item.id);
      $("lens").setAttribute("aria-busy", false);
      if (item.nats !== now.nats) {
        view.scoreCharacter(i, { ...item, ...now });
        if (shown === i) why(i);
      }
      if (!waiting) return;
      if (i in before) heads.say(`${selected(i)}The text is read again.`);
      judge();
    });
    if (waiting && i === 0) judge(); // it was not predicted
  };

  // Return how the probability of a character has changed with the heads.
  const change = (i) => {
    const [was, is] = [before[i], view.items[i].nats].map((nats) => percent(Math.exp(-nats)));
    return `${was} → ${is}.`;
  };
  const selected = (i) => `Selected ${quoted(vocabulary[view.items[i].id])}: ${change(i)} `;

  const options = { onShow: why, onSelect: look, panel: $("why") };
  const view = new TextView($("text"), vocabulary, options);

  const settings = () => {
    const wrong = names.find((name) => !$(name).reportValidity() || $(name).value === "");
    if (!wrong) return Object.fromEntries(names.map((name) => [name, Number($(name).value)]));
    $(wrong).focus();
    return null;
  };

  const clear = () => {
    view.clear();
    [prompt, shown, before, waiting, end, rate] = [null, null, null, false, 0, 0];
    $("why").replaceChildren();
    $("lens").hidden = true;
    inspect(null);
    ask("judge", { stop: true });
  };

  // Begin a new text with the prompt; return whether that is possible.
  const begin = () => {
    const text = encode($("prompt"), $("prompt-error"), ids);
    if (!text) return false;
    clear();
    prompt = $("prompt").value;
    const started = text.length && !separator.length;
    view.append(started ? [] : [{ id: start }], { given: true, hidden: true });
    view.append(text.map((id) => ({ id })), { given: true });
    given = end = view.items.length;
    return true;
  };

  // Judge the given characters that have not been judged, then write up to position `until`.
  const write = (until, pace = 0) => {
    const chosen = settings();
    if (!chosen) return;
    writing = true;
    const { temperature, top_k, top_p, min_p } = chosen;
    const filtered = top_k > 0 || top_p < 1 || min_p > 0;
    note =
      temperature === 1 && !filtered
        ? ""
        : ` The percentages are the model's, at temperature 1; the text is drawn at temperature ` +
          `${temperature}${filtered ? ", without the characters that the filters drop" : ""}.`;
    const text = view.items.map(({ id }) => id);
    const judged = view.items.findLastIndex(({ nats }) => nats !== undefined) + 1;
    const windowFrom = windowStartIn(text, text.length, data.config);
    const from = Math.max(1, judged, judged ? 0 : windowFrom + 1);
    const message = { ids: text, from: Math.min(from, text.length), end: until };
    ask("write", { ...message, settings: chosen, pace }, (report) => {
      const known = Math.max(0, view.items.length - report.from);
      report.items.slice(0, known).forEach((item, i) => view.scoreCharacter(report.from + i, item));
      view.append(report.items.slice(known));
      rate = report.rate;
      writing = view.items.length < until;
      if (shown >= report.from) why(shown); // it has been judged now
      if (!checked) check();
      checked = true;
      if (alive && view.selected === null) selectSurprise();
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
    if (before) judge();
    view.append([{ id, top, rank, nats: -Math.log(top[rank - 1][1]) }]);
    view.selected = null;
    view.select(i);
    view.box.focus({ preventScroll: true }); // the button that was chosen is gone
    if (end <= i + 1) end = i + 1 + Number($("max_new_tokens").value);
    write(end);
  };

  // Judge the text again with the present heads, first what is in view; then say what has changed.
  const judge = () => {
    waiting = false;
    const text = view.items.map(({ id }) => id);
    const first = view.items.findIndex(({ nats }) => nats !== undefined);
    if (first < 0) return (before = null); // there is nothing to judge
    const [top, bottom] = view.visible().map((i) => Math.max(first, i));
    const spans = [[top, bottom], [bottom, text.length], [first, top]];
    const message = { ids: text, spans: spans.filter(([from, to]) => from < to) };
    ask("judge", message, ({ items, done }) => {
      for (const { position, ...item } of items) view.scoreCharacter(position, item);
      if (items.some(({ position }) => position === shown)) why(shown);
      if (done) sayChange();
      update();
    });
  };

  // Say how the losses have changed, and name the character whose loss has changed most.
  const sayChange = () => {
    const judged = Object.keys(before).map(Number).filter((i) => i < view.items.length);
    const difference = (i) => Math.abs(view.items[i].nats - before[i]);
    const mean = (loss) => judged.reduce((sum, i) => sum + loss(i), 0) / judged.length;
    const [was, is] = [mean((i) => before[i]), mean((i) => view.items[i].nats)];
    const most = judged.reduce((best, i) => (difference(i) > difference(best) ? i : best));
    const around = view.items.slice(Math.max(0, most - 12), most).map(({ id }) => vocabulary[id]);
    const name = `${quoted(vocabulary[view.items[most].id])} after “${escapedText(around)}”`;
    const button = element("button", { text: name });
    button.addEventListener("click", () => view.selected === most || view.select(most));
    heads.say(
      view.selected in before ? selected(view.selected) : "",
      `Mean loss of the text: ${was.toFixed(4)} → ${is.toFixed(4)} nats. Changed most: `,
      button, `: ${change(most)}`,
    );
    before = null;
  };

  heads.changed.push(() => {
    before ||= Object.fromEntries(
      view.items.map(({ nats }, i) => [i, nats]).filter(([, nats]) => nats !== undefined),
    );
    ask("judge", { stop: true });
    waiting = true;
    if (view.selected !== null) look(view.selected);
    else judge();
  });

  const stale = () => prompt !== $("prompt").value;
  $("write").addEventListener("click", () => {
    if (writing) return pause();
    if (stale() && !begin()) return update();
    if (view.items.length >= end) end = view.items.length + Number($("max_new_tokens").value);
    write(end);
  });
  $("step").addEventListener("click", () => {
    if (stale() && !begin()) return update();
    write(view.items.length + 1);
  });
  $("restart").addEventListener("click", () => {
    pause();
    clear();
    update();
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
    const { items } = view;
    view.markWindow(windowStartIn(items.map(({ id }) => id), items.length, data.config));
    const label = items.length && !stale() ? "Continue" : "Write";
    $("write").textContent = writing ? "Pause" : label;
    $("status").setAttribute("aria-busy", writing); // read out when it is complete
    $("step").disabled = writing;
    $("restart").disabled = $("copy").disabled = !items.length;
    const judged = items.filter(({ nats }) => nats !== undefined);
    const mean = judged.reduce((sum, { nats }) => sum + nats, 0) / judged.length;
    const speed = rate > 0 ? ` · ${count(Math.round(rate))} characters/s` : "";
    $("status").textContent = judged.length
      ? `${count(items.length)} characters${speed} · mean loss ${lossText(mean)}`
      : "";
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
  let result = null;
  for (const [id, length] of [["layer", layers], ["head", H]]) {
    $(id).append(...Array.from({ length }, (_, i) => element("option", { text: i + 1, value: i })));
    $(id).addEventListener("change", () => draw());
  }
  $("layer").value = layers - 1;
  const view = new TextView($("window"), vocabulary, { onSelect: (i) => view.select(i) });

  const draw = () => {
    const { window, attention, previous, induction } = result;
    const [layer, head] = [Number($("layer").value), Number($("head").value)];
    const row = attention[layer * H + head];
    const most = argmax(row);
    $("most").textContent = `${percent(row[most])}: ${describe(vocabulary[window[most]])}`;
    row.forEach((weight, i) => {
      view.spans[i].style.setProperty("--weight", weight / row[most]);
      view.spans[i].title = percent(weight);
    });
    const share = (means, n) => {
      return means ? `${percent(means.heads[n])} (${percent(means.uniform)})` : "none here";
    };
    const rows = Array.from({ length: H }, (_, h) => {
      const [n, button] = [layer * H + h, element("button", { text: h + 1 })];
      button.setAttribute("aria-pressed", h === head);
      button.setAttribute("aria-label", `Head ${h + 1}`);
      button.addEventListener("click", () => {
        $("head").value = h;
        draw();
      });
      const label = `Use head ${h + 1}`;
      const input = element("input", { type: "checkbox", role: "switch", "aria-label": label });
      input.checked = !heads.off.has(n);
      input.addEventListener("change", () => heads.toggle(n));
      return element("tr", { className: input.checked ? "" : "off" }, [
        element("td", {}, [button]),
        element("td", {}, [input]),
        element("td", {}, [strip(attention[n])]),
        element("td", { text: share(previous, n) }),
        element("td", { text: share(induction, n) }),
      ]);
    });
    const controls = () => Array.from($("heads").querySelectorAll("button, input"));
    const focused = controls().indexOf(document.activeElement);
    $("heads").replaceChildren(...rows);
    controls()[focused]?.focus();
  };

  return (ids, n, onLens) => {
    $("attention").setAttribute("aria-busy", true);
    if (!ids || n === 0) {
      $("attention").hidden = true;
      ask("inspect", { stop: true });
      $("attention-status").textContent = ids
        ? "The first character was given: the model did not predict it."
        : "Select a character above.";
      return;
    }
    $("attention-status").textContent = "Reading the window.";
    ask("inspect", { ids: ids.slice(0, n + 1), n }, (report) => {
      if (report.done) {
        $("attention-status").textContent = `Reading the window: ${report.done} of ${report.of}.`;
        return;
      }
      result = report;
      const [last, next] = [report.window.length - 1, vocabulary[ids[n]]];
      $("attention-status").textContent =
        `Before ${describe(next)}, the model had read ${count(last + 1)} ` +
        `character${last ? "s" : ""}, up to ${describe(vocabulary[report.window[last]])}.`;
      view.clear();
      view.append(report.window.map((id) => ({ id })));
      $("verdict").textContent = verdict(report, H, config.token_shifts);
      $("attention").hidden = false;
      $("attention").setAttribute("aria-busy", false);
      draw();
      onLens(report.lens);
    });
  };
}

// Return a sentence that names the previous-character heads and the induction heads.
function verdict({ previous, induction }, H, tokenShifts) {
  const found = (means) => {
    const least = Math.max(HEAD_SHARE, HEAD_FACTOR * (means?.uniform ?? 1));
    const heads = means ? Array.from(means.heads.keys()) : [];
    return heads.filter((n) => means.heads[n] >= least).map((n) => headName(n, H)).join(", ");
  };
  const shifts = tokenShifts
    ? ` This model hardly needs one: it adds embeddings of the ${tokenShifts} previous characters.`
    : "";
  return (
    `Previous-character heads: ${found(previous) || `none in this text.${shifts}`} ` +
    `Induction heads, which attend to what followed the last two characters earlier in the text: ` +
    `${found(induction) || "none in this text."} (Heads are named if the pattern gets at least ` +
    `${100 * HEAD_SHARE} % of their attention, ${HEAD_FACTOR} times what uniform attention gives.)`
  );
}

// Draw a row of attention weights as a strip; the largest weight is the darkest.
function strip(row) {
  const canvas = element("canvas", { width: row.length, height: 1, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const color = getComputedStyle(document.documentElement).getPropertyValue("--attended");
  const most = row[argmax(row)];
  row.forEach((weight, i) => {
    context.fillStyle = `rgb(${color} / ${weight / most})`;
    context.fillRect(i, 0, 1, 1);
  });
  return canvas;
}

function showScore(ask, vocabulary, ids, { off }) {
  let running = false;
  const view = new TextView($("scored"), vocabulary, {
    onShow: (i) => showWhy($("score-why"), vocabulary, view.items[i]),
    panel: $("score-why"),
  });
  const finish = (text) => {
    running = false;
    $("score-result").setAttribute("aria-busy", false);
    $("score").textContent = "Score";
    $("score-result").textContent = text;
  };
  $("score-text").addEventListener("input", () => ($("score-error").hidden = true));
  $("score").addEventListener("click", () => {
    if (running) {
      ask("score", { stop: true });
      finish("Cancelled.");
      return;
    }
    const text = encode($("score-text"), $("score-error"), ids);
    if (!text) return;
    view.clear();
    $("score-why").replaceChildren();
    $("scored").hidden = text.length < 2;
    $("score-progress").value = 0;
    if (text.length < 2) {
      finish("At least 2 characters are needed.");
      return;
    }
    running = true;
    $("score-result").setAttribute("aria-busy", true); // read out when it is complete
    $("score").textContent = "Cancel";
    $("score-progress").max = text.length - 1;
    view.append([{ id: text[0] }], { given: true });
    const without = off.size ? `, with ${off.size} head${off.size > 1 ? "s" : ""} off` : "";
    ask("score", { ids: text }, ({ items, done, nats }) => {
      view.append(items.slice(0, Math.max(0, MAX_SHOWN - view.items.length)));
      $("score-progress").value = done;
      const mean = `${lossText(nats / done)} per character`;
      const loss = `${mean}, over ${count(done)} predictions${without}`;
      const part = text.length > MAX_SHOWN ? `; only the first ${count(MAX_SHOWN)} are shown` : "";
      if (done === text.length - 1) finish(loss + part);
      else $("score-result").textContent = `${loss} so far`;
    });
  });
}

function showAbout({ about, config }, vocabulary) {
  const { loss, loss_step: lossStep, steps } = about;
  const at = lossStep === steps ? "" : `, the lowest, at step ${count(lossStep)}`;
  const facts = {
    Text: escapedText(about.text),
    Parameters: count(about.parameters),
    Layers: count(config.n_layer),
    "Attention heads": `${count(config.n_head)} in each layer`,
    "Embedding size": count(config.n_embd),
    Context: `${count(config.block_size)} characters`,
    Vocabulary: `${count(vocabulary.length)} characters: ${vocabulary.map(named).join(" ")}`,
    "Training steps": count(steps),
    "Validation loss": loss === null ? "not measured" : `${lossText(loss)} per character${at}`,
  };
  for (const [name, text] of Object.entries(facts)) {
    $("facts").append(element("dt", { text: name }), element("dd", { text }));
  }
}

if (typeof document !== "undefined") showPage();
else if (typeof WorkerGlobalScope !== "undefined") serve();

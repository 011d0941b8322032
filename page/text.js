// What all sections need: names of characters, elements, and a text of selectable characters.
"use strict";

const $ = (id) => document.getElementById(id);
const count = (n) => n.toLocaleString("en");
const percent = (p) => `${(100 * p).toFixed(p < 0.001 ? 3 : 1)}\u00a0%`;

const NAMES = { "\n": "newline", "\t": "tab", " ": "space" };
const BLANK = /[\p{C}\p{M}\p{Z}\u115f\u1160\u2800\u3164\uffa0]/u; // one sees nothing of it
const OBEYED = /[^\P{Cc}\n\t]|[\p{Bidi_C}\u2028\u2029]/u; // controls, and changes of direction

const codePoint = (c) => `U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
const isolated = (text) => `\u2068${text}\u2069`; // its direction does not change what is around

// Return a character, or the name of one that cannot be seen: `space`, `U+00A0`.
const characterName = (c) => NAMES[c] || (BLANK.test(c) ? codePoint(c) : c);

// Return the name of a character in a sentence.
const quoted = (c) => (characterName(c) === c ? `‘${isolated(c)}’` : characterName(c));

// Return a character as it stands in a text: joiners and marks do their work there.
const inText = (c) => (OBEYED.test(c) ? codePoint(c) : c);
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
    // a translation puts <font> into a span
    const at = ({ target }) => this.spans.indexOf(target.closest("span"));
    box.addEventListener("pointerover", (event) => {
      const i = at(event);
      if (this.selected === null && i >= 0) onShow(i);
    });
    box.addEventListener("click", (event) => {
      const i = at(event);
      if (i >= 0) this.select(i);
      if (i >= 0 && this.selected === i) panel?.scrollIntoView({ block: "nearest" });
    });
    box.addEventListener("keydown", (event) => this.move(event));
    box.addEventListener("scroll", () => {
      this.atEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 30;
    });
  }

  get ids() {
    return this.items.map(({ id }) => id);
  }

  clear() {
    [this.items, this.spans, this.first] = [[], [], 0]; // first: the first that is not hidden
    [this.selected, this.windowStart, this.atEnd] = [null, 0, true]; // atEnd: scroll with new text
    this.box.replaceChildren();
  }

  // Items without a loss are not colored. With `hidden`, these first characters are not shown.
  append(items, { given = false, hidden = false } = {}) {
    const { box, spans } = this;
    if (hidden) this.first = items.length;
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
    const [{ spans, first, selected: at }, { key }] = [this, event];
    if (key === "Escape" && at !== null) this.select(at);
    const last = spans.length - 1;
    const line = spans[at ?? last]?.parentElement;
    const back = line && getComputedStyle(line).direction === "rtl" ? "ArrowRight" : "ArrowLeft";
    const targets = { Home: first, End: last, ArrowLeft: at + 1, ArrowRight: at + 1, [back]: at - 1 };
    if (!line || !(key in targets)) return;
    event.preventDefault();
    const target = at === null && key.startsWith("Arrow") ? last : targets[key];
    if (target !== at && target >= first && target <= last) this.select(target);
  }
}

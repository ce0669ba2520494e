// Elements, numbers and tables. All text goes in as text: nothing that a worker or a client says becomes markup.

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  fill(element, ...children);
  return element;
}

const flat = (children) => children.flat(Infinity).filter((each) => each != null && each !== false && each !== "");

export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
}

const keyOf = (node, idx) => `${node.nodeName} ${node.dataset?.key ?? idx}`;

// Replaces the children of an element by as few changes as possible, so that focus and selection stay where they are.
export function refill(element, ...children) {
  const known = new Map([...element.childNodes].map((node, idx) => [keyOf(node, idx), node]));
  arrange(element, flat(children).map((child, idx) => {
    const fresh = child instanceof Node ? child : new Text(child);
    const old = known.get(keyOf(fresh, idx));
    known.delete(keyOf(fresh, idx)); // it stands in one place
    return old ? morph(old, fresh) : fresh;
  }));
}

function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return old;
  if (old instanceof Text) old.data = fresh.data;
  else {
    for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    old.style.cssText = fresh.style.cssText; // the content security policy refuses it as an attribute
    refill(old, ...fresh.childNodes);
  }
  return old;
}

// Sets the children of an element, in this order; the focused element keeps the focus.
function arrange(element, nodes) {
  const focused = document.activeElement;
  const wanted = new Set(nodes);
  for (const node of [...element.childNodes]) if (!wanted.has(node)) node.remove();
  let place = element.firstChild;
  for (const node of nodes) {
    if (node === place) place = place.nextSibling;
    else element.insertBefore(node, place);
  }
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
export const exact = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
export const short = (value) => (value == null ? "–" : compact.format(value));
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
export const tokens = (value) => count(value, "token");
export const plain = (text) => text.replace(/<\|?\w+\|?>/g, " ").trim(); // without the marks of a chat's template
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

export function seconds(value) {
  if (value == null) return "–";
  if (!value) return "0 s";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : duration(value);
}

export function duration(value) {
  if (value < 60) return `${Math.max(0, Math.round(value))} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} d`;
}

export const host = (url) => url.replace(/^https?:\/\//, "");
export const tile = (name, value, note) =>
  h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value), note && h("dd", { class: "note" }, note));

export const facts = (values) =>
  h("dl", { class: "facts" }, Object.entries(values).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export const field = (label, input) => h("label", {}, h("span", { class: "unseen" }, label), input);

const spaced = (name) => name.replaceAll("-", " ");

// A bar of parts, each [name, value], as long as their sum is of `whole`; `format` shows the values, if no number beside the bar does.
export function bar(parts, whole, format = null) {
  const seen = parts.filter(([, value]) => value > 0).map(([name, value]) => ({ name, value, text: format && `${spaced(name)} ${format(value)}` }));
  const label = format && seen.map((each) => each.text).join(", ");
  return h("span", { class: "bar", ...(label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" }) }, seen.map(({ name, value, text }) => {
    const part = h("span", { class: `part ${name}`, title: text });
    part.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    return part;
  }));
}

export const legend = (names) =>
  h("ul", { class: "legend" }, names.map((name) => h("li", {}, h("span", { class: `part ${name}` }), ` ${spaced(name)}`)));

// The details of one row, which a link opens and another one closes.
export class Detail {
  constructor(label, href, ...children) {
    this.title = h("h2", { tabindex: "-1" });
    this.element = h("section", { class: "detail", "aria-label": label }, h("a", { href, class: "close" }, "Close"), this.title, ...children);
  }

  show(title) {
    this.element.hidden = !title;
    refill(this.title, title);
  }
}

// A table that is updated in place: rows are identified by their key, and drawn again if their data have changed.
export class Table {
  // `link` returns the target of a row's first cell, `scale` the longest bar of all rows; `nothing` is shown without rows.
  constructor(caption, columns, key, { sort = null, link = null, scale = null, nothing = "None." } = {}) {
    Object.assign(this, { columns, key, link, scale, sort, isDown: false, rows: new Map(), last: [] });
    this.head = columns.map((column) => {
      const name = column.value
        ? h("button", { type: "button", onclick: () => this.sortBy(column.name) }, column.name)
        : column.name;
      return h("th", { scope: "col", class: column.class ?? "" }, name);
    });
    this.body = h("tbody");
    this.nothing = h("tr", {}, h("td", { colspan: columns.length, class: "note" }, nothing));
    const table = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, this.head)), this.body);
    this.element = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, table);
    this.mark();
  }

  sortBy(name) {
    this.isDown = this.sort === name ? !this.isDown : this.columns.find((each) => each.name === name).class === "number";
    this.sort = name;
    this.mark();
    this.update(this.last);
  }

  mark() {
    this.columns.forEach((column, idx) => {
      const order = this.isDown ? "descending" : "ascending";
      if (column.value) this.head[idx].setAttribute("aria-sort", column.name === this.sort ? order : "none");
    });
  }

  update(rows) {
    this.last = rows;
    const column = this.columns.find((each) => each.name === this.sort);
    if (column) {
      const sign = this.isDown ? -1 : 1;
      const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      rows = rows.toSorted((a, b) => sign * order(column.value(a), column.value(b)));
    }
    const [before, longest] = [this.rows, this.scale?.(rows)];
    this.rows = new Map(rows.map((data) => [this.key(data), this.row(data, before.get(this.key(data)), longest)]));
    arrange(this.body, rows.length ? [...this.rows.values()].map((row) => row.element) : [this.nothing]);
  }

  row(data, before, longest) {
    if (before?.data === data && before.longest === longest) return before;
    const cells = this.columns.map((column, idx) => {
      const text = column.text(data);
      const [main, note, kind] = Array.isArray(text) ? text : [text];
      const content = !idx && this.link ? h("a", { href: this.link(data) }, main) : main;
      const marked = kind ? h("span", { class: `mark ${kind}` }, content) : content;
      const props = { class: column.class ?? "", scope: idx ? null : "row" };
      return h(idx ? "td" : "th", props, marked, note && h("small", {}, note), column.bar && bar(...column.bar(data, longest)));
    });
    const fresh = h("tr", {}, cells);
    return { element: before ? morph(before.element, fresh) : fresh, data, longest };
  }
}

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

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((each) => each != null && each !== false && each !== ""));
}

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
export const number = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));
export const short = (value) => (value == null ? "–" : compact.format(value));
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
export const tokens = (value) => `${number(value)} tokens`;
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

// A bar of parts, each [name, seconds], as long as their sum is of `whole`; numbers stand beside it in the table.
export function bar(parts, whole) {
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  for (const [name, value] of parts) {
    if (!(value > 0)) continue;
    const part = h("span", { class: `part ${name}`, title: `${name.replaceAll("-", " ")}: ${seconds(value)}` });
    part.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    bar.append(part);
  }
  return bar;
}

export const legend = (names) =>
  h("ul", { class: "legend" }, names.map((name) => h("li", {}, h("span", { class: `part ${name}` }), ` ${name.replaceAll("-", " ")}`)));

// A table that stays: rows are known by their key, and only cells whose text is another one are touched.
export class Table {
  constructor(caption, columns, key, { sort = null, open = null } = {}) {
    Object.assign(this, { columns, key, open, sort, isDown: false, rows: new Map(), last: [] });
    this.head = columns.map((column) => {
      const name = column.value
        ? h("button", { type: "button", onclick: () => this.sortBy(column.name) }, column.name)
        : column.name;
      return h("th", { scope: "col", class: column.class ?? "" }, name);
    });
    this.body = h("tbody");
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
    const seen = new Set(rows.map(this.key));
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    let place = this.body.firstChild;
    for (const data of rows) {
      const row = this.row(data);
      if (row.element === place) place = place.nextSibling;
      else this.body.insertBefore(row.element, place);
    }
  }

  row(data) {
    const key = this.key(data);
    let row = this.rows.get(key);
    if (!row) {
      const cells = this.columns.map((column, idx) => h(idx ? "td" : "th", { class: column.class ?? "", scope: idx ? null : "row" }));
      row = { element: h("tr", {}, cells), cells, shown: [], data: null };
      this.rows.set(key, row);
    }
    if (row.data === data) return row;
    row.data = data;
    this.columns.forEach((column, idx) => {
      const text = column.text(data);
      const shown = JSON.stringify([text, column.bar?.(data)]);
      if (row.shown[idx] === shown) return;
      row.shown[idx] = shown;
      const [main, note, kind] = Array.isArray(text) ? text : [text];
      const content = !idx && this.open ? h("button", { type: "button", class: "link", onclick: () => this.open(key) }, main) : main;
      const marked = kind ? h("span", { class: `mark ${kind}` }, content) : content;
      fill(row.cells[idx], marked, note && h("small", {}, note), column.bar && bar(...column.bar(data)));
    });
    return row;
  }
}

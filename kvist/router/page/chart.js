// Lines over time, which also differ by their dashes.

import { h } from "/ui/dom.js";

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

export class Chart {
  // `format` shows a value, `moment` a time.
  constructor(label, format, moment, { range = null, height = 240 } = {}) {
    Object.assign(this, { label, format, moment, range, height });
    this.element = h("div", { class: "chart", role: "img" });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.width = null));
  }

  // Lines are [name, values], with a value or null for each time; shows times from `min` to `max`, and the values `at` one of them.
  update(times, lines, min, max, at = null) {
    const data = [times, ...lines.map(([, values]) => values)];
    if (this.width !== this.element.clientWidth) this.build(lines, times.length < 3);
    this.plot.setData(data, false);
    this.plot.setScale("x", { min, max });
    if (this.plot.cursor.idx == null) this.plot.setLegend({ idx: times.length - 1 });
    if (at !== null) this.plot.setCursor({ left: this.plot.valToPos(at, "x"), top: 0 });
    this.element.setAttribute("aria-label", [this.label, ...lines.map((line) => this.describe(...line))].join("; "));
  }

  // The description of a line for screen readers.
  describe(name, values) {
    const known = values.filter((each) => each != null);
    if (!known.length) return `${name}: nothing yet`;
    const [least, most, last] = [Math.min(...known), Math.max(...known), known.at(-1)].map(this.format);
    return `${name}: ${least} to ${most}, at last ${last}`;
  }

  build(lines, isSparse) {
    this.plot?.destroy();
    this.width = this.element.clientWidth;
    const colour = (name) => {
      this.element.style.color = `var(${name})`;
      return getComputedStyle(this.element).color;
    };
    const shown = (format) => (_, value) => (value == null ? "–" : format(value));
    const axis = (format) => ({ stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, space: 70, values: (_, values) => values.map(format) });
    const series = lines.map(([label], idx) => ({ label, stroke: colour(`--line-${idx + 1}`), width: 2, dash: DASHES[idx], points: { show: isSparse }, value: shown(this.format) }));
    const scales = { x: { auto: false }, y: { range: this.range ?? ((_, low, high) => [0, 1.05 * high || 1]) } };
    const options = { width: this.width, height: this.height, scales, axes: [{ ...axis(this.moment), size: 34 }, { ...axis(this.format), size: 68, space: 30 }], series: [{ value: shown(this.moment) }, ...series] };
    this.plot = new uPlot(options, null, this.element);
    this.element.style.color = "";
  }
}

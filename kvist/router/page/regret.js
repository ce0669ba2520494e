// Where the hits went: what could have been cached, what was, and what to do about the difference.

import { Chart } from "/ui/chart.js";
import { Table, clock, duration, h, host, number, refill, share, short, tile } from "/ui/dom.js";

const LINES = [
  { name: "pooled cache", value: (row) => Math.min(row.prompt_tokens, Math.max(row.pooled_cache_tokens, row.held_tokens)) / row.prompt_tokens }, // estimated; held is not
  { name: "held", value: (row) => row.held_tokens / row.prompt_tokens },
  { name: "routed", value: (row) => row.routed_tokens / row.prompt_tokens },
  { name: "reported", value: (row) => row.reported_tokens / row.prompt_tokens_with_report },
];

const CAUSES = [
  { name: "Cause", text: (row) => row.cause },
  { name: "Tokens", class: "number", text: (row) => short(row.tokens) },
  { name: "Of prompts", class: "number", text: (row) => share(row.tokens, row.whole), bar: (row) => [[["loss", row.tokens]], row.whole] },
  { name: "Remedy", class: "prose", text: (row) => row.remedy },
];
const BY = [
  { name: "Worker", value: (row) => row.worker, text: (row) => host(row.worker) },
  { name: "Model", value: (row) => row.model, text: (row) => row.model },
  { name: "Requests", class: "number", value: (row) => row.requests, text: (row) => number(row.requests) },
  { name: "Prompt tokens", class: "number", value: (row) => row.prompt_tokens, text: (row) => short(row.prompt_tokens) },
  ...LINES.map((line) => ({ name: line.name, class: "number", value: (row) => line.value(row) || 0, text: (row) => share(line.value(row) || 0, 1) })),
];
const COSTLIEST = [
  { name: "Prefix", class: "mono", text: (row) => row.prefix },
  { name: "Lost tokens", class: "number", text: (row) => short(row.lost_tokens) },
  { name: "Length", class: "number", text: (row) => number(row.length_tokens) },
  { name: "Requests", class: "number", text: (row) => number(row.requests) },
];

let tiles, chart, causes, by, costliest, note;

export default {
  name: "regret",
  title: "Regret",
  source: "regret",
  build() {
    tiles = h("dl", { class: "tiles" });
    chart = new Chart("Shares of prompt tokens, minute by minute", (value) => `${value.toFixed(1)} %`, clock, { range: [0, 100] });
    causes = new Table("Lost tokens by cause", CAUSES, (row) => row.cause, { nothing: "No tokens lost." });
    by = new Table("By worker", BY, (row) => `${row.worker} ${row.model}`, { sort: "Worker", nothing: "No requests yet." });
    costliest = new Table("Costliest prefixes", COSTLIEST, (row) => row.prefix, { link: (row) => `#prefixes/${row.prefix}`, nothing: "No tokens lost." });
    note = h("p", { class: "note" });
    return [tiles, chart.element, note, ...[["Lost tokens by cause", causes], ["By worker", by], ["Costliest prefixes", costliest]].map(([title, table]) => [h("h2", {}, title), table.element]).flat()];
  },
  update({ regret, clock: at }) {
    if (!regret) return;
    const { total, sample } = regret;
    const [most, held, routed, reported] = LINES.map((line) => share(line.value(total) || 0, 1));
    refill(
      tiles,
      tile("Requests", number(total.requests), `${short(total.prompt_tokens)} prompt tokens, last ${duration(regret.window_s)}`),
      tile("Pooled cache", most, `one as large as all together, ± ${Math.min(100, 200 * sample.standard_error).toFixed(1)} points`),
      tile("Held", held, "by the worker that held most"),
      tile("Routed", routed, "held by the chosen worker"),
      tile("Reported", reported, "found cached, by engines that report it"),
    );
    const minutes = regret.by_minute, times = minutes.map((each) => at - each.ago_s);
    const lines = LINES.map((line) => [line.name, minutes.map((each) => (Number.isFinite(line.value(each)) ? 100 * line.value(each) : null))]);
    chart.update(times, lines, Math.min(at - 600, times[0] ?? at), at);
    causes.update(regret.losses.map((loss) => ({ ...loss, whole: total.prompt_tokens })));
    by.update(regret.by_worker);
    costliest.update(regret.costliest_prefixes);
    refill(note, `By the minute; see docs/why.md. The pooled cache is estimated from a sample of ${number(sample.blocks)} blocks.`);
  },
};

// The tree of prefixes that requests asked for of late: how often, how much of it was held, and who holds it now.

import { now, state } from "/ui/app.js";
import { Table, duration, fill, h, host, number, share } from "/ui/dom.js";

const MIN_SHARE = 0.004;
const MAX_LEVELS = 12;
const hits = (node) => node.hits / node.uses;
const name = (node) => (node.text ? node.text.trim().slice(0, 80) : node.prefix);
const tiers = (node) => Object.entries(node.tiers).map(([tier, count]) => `${count} × ${tier}`).join(", ") || "nobody";

const COLUMNS = [
  { name: "Prefix", value: (n) => n.prefix, text: (n) => [n.prefix, n.text] },
  { name: "Model", value: (n) => n.model, text: (n) => n.model },
  { name: "From", class: "number", value: (n) => n.from_tokens, text: (n) => number(n.from_tokens) },
  { name: "To token", class: "number", value: (n) => n.to_tokens, text: (n) => number(n.to_tokens) },
  { name: "Asked for", class: "number", value: (n) => n.uses, text: (n) => number(n.uses) },
  { name: "Held", class: "number", value: hits, text: (n) => share(n.hits, n.uses) },
  { name: "Held by", class: "number", value: (n) => n.num_holders, text: (n) => [number(n.num_holders), tiers(n)] },
  { name: "Last asked for", class: "number", value: (n) => -n.used_at, text: (n) => `${duration(now() - n.used_at)} ago` },
];

let table, icicle, detail, chosen, drawn;

function branch(node, nodes, whole, level) {
  const below = nodes.filter((each) => each.parent === node.place && each.uses >= MIN_SHARE * whole);
  const label = `${number(node.to_tokens)} tokens, asked for ${number(node.uses)} times, held ${share(node.hits, node.uses)}`;
  const box = h(
    "button",
    { type: "button", class: `heat${Math.round(4 * hits(node))}`, title: label, "aria-label": `${name(node)}: ${label}`, "aria-pressed": String(node.prefix === chosen), "data-prefix": node.prefix, onclick: () => choose(node.prefix) },
    number(node.to_tokens),
    " ",
    h("small", {}, node.text ? name(node) : share(node.hits, node.uses)),
  );
  const item = h("li", {}, box, below.length && level < MAX_LEVELS ? h("ul", {}, below.map((each) => branch(each, nodes, whole, level + 1))) : null);
  item.style.flexGrow = node.uses;
  return item;
}

function choose(prefix) {
  chosen = prefix === chosen ? null : prefix;
  drawn = null;
  view.update(state);
}

function details(node) {
  const holders = node.holders.map((holder) => h("li", {}, host(holder.replace(/ 0$/, "").replace(/ (\d+)$/, " rank $1"))));
  const more = node.num_holders - holders.length;
  return [
    h("h2", { class: "mono" }, node.prefix),
    h("p", {}, `Tokens ${number(node.from_tokens)} to ${number(node.to_tokens)} of ${node.model}: asked for ${number(node.uses)} times among the requests that were looked at, ${share(node.hits, node.uses)} of them where it was held; last ${duration(now() - node.used_at)} ago.`),
    node.text && h("pre", {}, node.text),
    h("h3", {}, `Held now: ${tiers(node)}`),
    h("ul", {}, holders, more > 0 ? h("li", {}, `and ${more} more`) : null),
  ];
}

const view = {
  name: "prefixes",
  title: "Prefixes",
  source: "prefixes",
  build() {
    drawn = null;
    table = new Table("Prefixes", COLUMNS, (node) => node.prefix, { sort: "Asked for", open: choose });
    table.isDown = true;
    table.mark();
    icicle = h("ul", { class: "icicle", "aria-label": "Prefixes, each below what it goes on from" });
    detail = h("section", { class: "detail", "aria-label": "Prefix", hidden: true });
    return [
      h("h1", { class: "unseen" }, "Prefixes"),
      h("p", { class: "note" }, "What requests begin with: as wide as often asked for, each below what it goes on from, up to the token that it says; the greener, the more often the chosen worker held it. From a sample of at most 20 requests a second."),
      icicle,
      detail,
      table.element,
    ];
  },
  update({ prefixes }) {
    if (!prefixes || prefixes === drawn) return;
    drawn = prefixes;
    const nodes = prefixes.map((node, place) => ({ ...node, place }));
    const roots = nodes.filter((node) => node.parent === null);
    const whole = roots.reduce((sum, node) => sum + node.uses, 0);
    const focused = document.activeElement?.dataset.prefix;
    fill(icicle, roots.length ? roots.map((node) => branch(node, nodes, whole, 1)) : h("li", {}, "No request was looked at yet whose prompt is read."));
    if (focused) [...icicle.querySelectorAll("button")].find((each) => each.dataset.prefix === focused)?.focus();
    const node = nodes.find((each) => each.prefix === chosen);
    detail.hidden = !node;
    if (node) fill(detail, details(node));
    table.update(nodes);
  },
};

export default view;

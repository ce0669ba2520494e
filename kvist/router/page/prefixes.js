// The tree of prefixes that recent requests asked for, or that recordings held at a moment, and who holds them.

import { linkTo, now, state } from "/ui/app.js";
import { Detail, Table, count, duration, h, host, number, plain, refill, seconds, share } from "/ui/dom.js";

const MIN_SHARE = 0.004;
const MAX_LEVELS = 12;
const name = (node) => (node.text ? plain(node.text).slice(0, 80) : node.prefix);
const tiers = (node) => Object.entries(node.tiers).map(([tier, count]) => `${count} × ${tier}`).join(", ") || "nobody";
const ago = (node) => `${duration(now() - node.used_at)} ago`;

const PLACE = [
  { name: "From", class: "number", value: (n) => n.from_tokens, text: (n) => number(n.from_tokens) },
  { name: "To token", class: "number", value: (n) => n.to_tokens, text: (n) => number(n.to_tokens) },
];
const HOLDERS = { name: "Held by", class: "number", value: (n) => n.num_holders, text: (n) => [number(n.num_holders), tiers(n)] };
// The size of a node, its share of green, its description and its texts: in the live page, and for recordings.
const ASKED = {
  size: (n) => n.uses,
  held: (n) => n.hits / n.uses,
  describe: (n) => `asked for ${count(n.uses, "time")}, ${share(n.hits, n.uses)} of them where it was held; last ${ago(n)}`,
  note: "What requests begin with: as wide as often asked for, each below what it goes on from, up to the token that it says; the greener, the more often the chosen worker held it. From a sample of at most 20 requests a second.",
  nothing: "No request was looked at yet whose prompt is read.",
  gone: "Nobody asked for this prefix of late.",
  columns: [
    { name: "Prefix", value: (n) => n.prefix, text: (n) => [n.prefix, n.text && plain(n.text)] },
    { name: "Model", value: (n) => n.model, text: (n) => n.model },
    ...PLACE,
    { name: "Asked for", class: "number", value: (n) => n.uses, text: (n) => number(n.uses) },
    { name: "Held", class: "number", value: (n) => n.hits / n.uses, text: (n) => share(n.hits, n.uses) },
    HOLDERS,
    { name: "Last asked for", class: "number", value: (n) => -n.used_at, text: ago },
  ],
  sort: "Asked for",
};
const RECORDED = {
  size: (n) => n.blocks,
  held: (n) => n.num_holders / n.num_ranks,
  describe: (n) => `${number(n.blocks)} blocks of it and of what follows it, held by ${number(n.num_holders)} of ${number(n.num_ranks)} ranks; the newest came at ${seconds(n.newest_s)}`,
  note: "What was held then: as wide as blocks are held of it and of what follows it, each below what it goes on from, up to the token that it says; the greener, the more ranks held it. What snapshots alone tell of has no place here.",
  nothing: "Nothing was held then of which is known what it follows.",
  gone: "This prefix was not held then.",
  columns: [
    { name: "Prefix", value: (n) => n.prefix, text: (n) => n.prefix },
    { name: "Recording", value: (n) => n.recording, text: (n) => n.recording },
    ...PLACE,
    { name: "Blocks", class: "number", value: (n) => n.blocks, text: (n) => number(n.blocks) },
    HOLDERS,
    { name: "Newest came", class: "number", value: (n) => n.newest_s, text: (n) => seconds(n.newest_s) },
  ],
  sort: "Blocks",
};

let kind, table, trees, detail, kept, chosen, drawn;

const isChosen = (node) => node.prefix === chosen || node.costly?.includes(chosen);
const link = (node) => `#prefixes/${node.prefix}`;

function branch(node, nodes, whole, level) {
  const below = nodes.filter((each) => each.parent === node.place && kind.size(each) >= MIN_SHARE * whole);
  const description = `tokens of ${name(node)}: ${kind.describe(node)}`;
  const box = h(
    "a",
    { href: link(node), title: `${number(node.to_tokens)} ${description}`, "aria-current": String(Boolean(isChosen(node))) },
    `${number(node.to_tokens)} `,
    h("small", { "aria-hidden": "true" }, node.text ? name(node) : share(kind.held(node), 1)),
    h("span", { class: "unseen" }, description),
  );
  box.style.setProperty("--heat", share(kind.held(node), 1).replace(" ", ""));
  const item = h("li", { "data-key": node.prefix }, box, below.length && level < MAX_LEVELS ? h("ul", {}, below.map((each) => branch(each, nodes, whole, level + 1))) : null);
  item.style.flexGrow = kind.size(node);
  return item;
}

function tree(nodes, title) {
  const roots = nodes.filter((node) => node.parent === null);
  const whole = roots.reduce((sum, node) => sum + kind.size(node), 0);
  const boxes = roots.length ? roots.map((node) => branch(node, nodes, whole, 1)) : h("li", {}, kind.nothing);
  return h("div", {}, title && h("h2", {}, title), h("ul", { class: "icicle", "aria-label": "Prefixes, each below what it goes on from" }, boxes));
}

function details(node) {
  const holders = node.holders.map((holder) => h("li", {}, host(holder.replace(/ 0$/, "").replace(/ (\d+)$/, " rank $1"))));
  const more = node.num_holders - holders.length;
  return [
    h("p", {}, `Tokens ${number(node.from_tokens)} to ${number(node.to_tokens)} of ${node.model ?? node.recording}: ${kind.describe(node)}.`),
    node.text && h("pre", {}, node.text),
    node.costly?.length ? h("p", {}, `Ends of prefixes that cost most: ${node.costly.join(", ")}.`) : null,
    h("h3", {}, `Held${node.recording ? "" : " now"}: ${tiers(node)}`),
    h("ul", {}, holders, more > 0 ? h("li", {}, `and ${more} more`) : null),
  ];
}

export default {
  name: "prefixes",
  title: "Prefixes",
  source: "prefixes",
  build() {
    [drawn, kind] = [null, state.fleet?.recordings ? RECORDED : ASKED];
    table = new Table("Prefixes", kind.columns, (node) => `${node.prefix} ${node.recording}`, { sort: kind.sort, link, nothing: kind.nothing });
    table.isDown = true;
    table.mark();
    trees = h("div", { class: "trees" });
    kept = h("div");
    detail = new Detail("Prefix", "#prefixes", kept);
    return [h("p", { class: "note" }, kind.note), trees, detail.element, table.element];
  },
  open(rest) {
    [chosen, drawn] = [rest, null];
    detail.show(chosen);
  },
  update({ fleet, prefixes }) {
    if (!prefixes || prefixes === drawn) return;
    drawn = prefixes;
    const shown = fleet.recordings?.map(({ name, ranks }, idx) => prefixes[idx].map((node, place) => ({ ...node, place, recording: name, num_ranks: ranks.length })));
    const all = shown ?? [prefixes.map((node, place) => ({ ...node, place }))];
    const focused = document.activeElement.hash;
    refill(trees, all.map((nodes, idx) => tree(nodes, fleet.recordings?.[idx].name)));
    if (focused && !document.activeElement.hash) linkTo(focused)?.focus(); // it was cut in two
    const nodes = all.flat().filter(isChosen);
    refill(kept, nodes.length ? nodes.map(details) : h("p", {}, kind.gone));
    table.update(all.flat());
  },
};

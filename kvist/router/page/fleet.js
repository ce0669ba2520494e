// Every worker: its state and why, its load, what it caches, how well that is known.

import { now, state } from "/ui/app.js";
import { Detail, Table, duration, facts, field, h, host, number, refill, seconds, share, short, tile, tokens } from "/ui/dom.js";
import { requestTable } from "/ui/requests.js";

const blocks = (worker) => worker.kv_events.ranks.reduce((sum, rank) => sum + rank.blocks, 0);
const held = (worker) => blocks(worker) * (worker.block_size ?? 16);
const fillShare = (worker) => (worker.cache_size_tokens ? held(worker) / worker.cache_size_tokens : null);
const hit = (worker, part, whole) => (worker.hits?.[whole] ? worker.hits[part] / worker.hits[whole] : -1);

const COLUMNS = [
  { name: "Worker", value: (w) => w.url, text: (w) => host(w.url) },
  { name: "Model", value: (w) => (w.models ?? [""]).join(), text: (w) => [w.models?.[0] ?? "any", w.models?.length > 1 ? `and ${w.models.length - 1} more` : null] },
  { name: "Role", value: (w) => w.role, text: (w) => w.role },
  { name: "State", value: (w) => w.shown.state[0], text: (w) => w.shown.state },
  { name: "Running", class: "number", value: (w) => w.running_requests, text: (w) => [number(w.running_requests), w.max_requests ? `of ${number(w.max_requests)}` : null] },
  { name: "To prefill", class: "number", value: (w) => w.prefill_tokens, text: (w) => short(w.prefill_tokens) },
  { name: "Cached", class: "number", value: held, text: (w) => [short(held(w)), fillShare(w) === null ? null : share(fillShare(w), 1)], bar: (w) => [[["fill", fillShare(w) ?? 0]], 1] },
  { name: "Predicted", class: "number", value: (w) => hit(w, "routed_tokens", "prompt_tokens"), text: (w) => share(w.hits?.routed_tokens, w.hits?.prompt_tokens) },
  { name: "Reported", class: "number", value: (w) => hit(w, "reported_tokens", "prompt_tokens_with_report"), text: (w) => share(w.hits?.reported_tokens, w.hits?.prompt_tokens_with_report) },
  { name: "Events", value: (w) => w.shown.events[0], text: (w) => w.shown.events },
  { name: "Tokens/s", class: "number", value: (w) => w.prompt_tokens_per_s ?? -1, text: (w) => short(w.prompt_tokens_per_s) },
  { name: "Circuit", value: (w) => w.circuit, text: (w) => [w.circuit.replace("_", " "), null, w.circuit === "closed" ? "" : "bad"] },
];

let table, tiles, search, only, detail, kept, list, url;

function details(worker) {
  const values = {
    State: worker.shown.state.slice(0, 2).filter(Boolean).join(": "),
    Engine: [worker.engine ?? "unknown", worker.version].filter(Boolean).join(" "),
    Models: worker.models?.join(", ") ?? "any",
    "Registered by": worker.registered_by.join(", "),
    "Block size": worker.block_size ? tokens(worker.block_size) : "unknown",
    "Cache size": worker.cache_size_tokens ? tokens(worker.cache_size_tokens) : "unknown",
    "Ended requests": number(worker.ended_requests),
    "Chat template": worker.rendering ? [worker.rendering.state, worker.rendering.reason].filter(Boolean).join(": ") : "not checked",
    "Last failure": worker.last_failure ?? "none",
  };
  const streams = worker.kv_events.sources.map((source) => {
    const age = source.last_event_at === null ? "no event yet" : `last event ${duration(now() - source.last_event_at)} ago, lag ${seconds(source.lag_s)}`;
    const counts = `${number(source.batches)} batches, ${source.gaps} gaps, ${source.restarts} restarts, ${source.malformed} malformed`;
    return h("li", {}, `${source.condition} ${source.url}: ${[source.reason, age, counts].filter(Boolean).join("; ")}`);
  });
  const ranks = worker.kv_events.ranks.map((rank) => h("li", {}, `rank ${rank.rank}: ${rank.state ?? "unknown"}, ${number(rank.blocks)} blocks`));
  return [
    facts(values),
    h("h3", {}, "Event streams and ranks"),
    h("ul", {}, streams, ranks, streams.length + ranks.length ? [] : h("li", {}, "none")),
  ];
}

export default {
  name: "fleet",
  title: "Fleet",
  get source() {
    return url ? "requests" : "fleet";
  },
  build() {
    table = new Table("Workers", COLUMNS, (worker) => worker.url, { sort: "Worker", nothing: "No such worker.", link: (worker) => `#fleet/${encodeURIComponent(worker.url)}` });
    list = requestTable("Last requests of the worker");
    tiles = h("dl", { class: "tiles" });
    search = h("input", { type: "search", placeholder: "Filter by name or model", oninput: () => this.update(state) });
    only = h("select", { onchange: () => this.update(state) }, ["All workers", "With problems"].map((text) => h("option", {}, text)));
    kept = h("div");
    detail = new Detail("Worker", "#fleet", kept, h("h3", {}, "Last requests"), list.element);
    return [tiles, h("div", { class: "tools" }, field("Filter", search), field("Show", only)), table.element, detail.element];
  },
  open(rest) {
    url = rest;
    detail.show(host(url));
  },
  update({ fleet, workers, requests }) {
    const all = [...workers.values()];
    const healthy = all.filter((worker) => worker.state === "healthy").length;
    const sum = (name) => all.reduce((total, worker) => total + (worker.hits?.[name] ?? 0), 0);
    refill(
      tiles,
      tile("Workers", `${healthy} of ${all.length}`, fleet.ready ? "healthy" : fleet.reason),
      tile("Requests a second", fleet.rate.toFixed(1)),
      tile("Running", number(fleet.running)),
      tile("Waiting", number(fleet.queued), "for a worker with room"),
      tile("Cached, predicted", share(sum("routed_tokens"), sum("prompt_tokens")), "of prompts, last 2 min"),
      tile("Cached, reported", share(sum("reported_tokens"), sum("prompt_tokens_with_report")), "by engines that report it"),
      tile("Blocks known", short(fleet.blocks), fleet.index ? `index ${fleet.index}` : "no index"),
    );
    const text = search.value.toLowerCase();
    table.update(
      all.filter((worker) => {
        const isBad = Object.values(worker.shown).some(([, , kind]) => kind === "bad" || kind === "warn");
        return `${worker.url} ${worker.models?.join(" ")}`.toLowerCase().includes(text) && (only.selectedIndex === 0 || isBad);
      }),
    );
    if (!url) return;
    const worker = workers.get(url);
    refill(kept, worker ? details(worker) : h("p", {}, "No such worker, or it was removed."));
    list.update(requests.filter((request) => [request.decision?.worker, request.prefill?.worker].includes(url)).slice(0, 50));
  },
};

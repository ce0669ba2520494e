// The last requests: where each went, the terms of its decision, how long each part took; and where a prompt would go.

import { ask, state } from "/ui/app.js";
import { Detail, Table, bar, clock, facts, field, fill, h, host, legend, number, plain, refill, seconds, share, tokens } from "/ui/dom.js";

const TERMS = { wait: "wait", compute: "compute", price_of_computing: "price-of-computing", in_flight: "in-flight", fetch: "fetch", running: "running", recent: "recent" };
const STEP = 200; // rows: drawing a thousand anew four times a second takes a browser most of its time
const PHASES = ["queue", "read", "prefill", "first-token", "decode"];

// How long each part of a request took, in order.
function phases(request) {
  const { queue_s: queue, sent_s: sent, first_byte_s: first, total_s: total, prefill_s: prefill = 0 } = request;
  if (sent == null) return [["queue", queue], ["read", total - queue]];
  const before = Math.max(0, sent - queue - prefill);
  const upTo = first ?? total;
  return [["queue", queue], ["read", before], ["prefill", prefill], ["first-token", upTo - sent], ["decode", total - upTo]];
}

const worker = (request) => request.decision?.worker ?? "";
const fetched = (pull) => `${tokens(pull.tokens)} to be fetched from ${host(pull.worker)}`;
const outcome = (request) => [`${request.status}`, request.error, request.status < 400 && !request.error ? "" : "bad"];
const longest = (requests) => requests.reduce((most, each) => Math.max(most, each.total_s), 0.001);

const COLUMNS = [
  { name: "Id", class: "mono", text: (r) => [r.id.length > 14 ? `…${r.id.slice(-12)}` : r.id, r.prompt && `… ${plain(r.prompt).slice(-48)}`] },
  { name: "Ended", text: (r) => clock(r.at) },
  { name: "Worker", text: (r) => [host(worker(r)) || "none", r.prefill ? `prefilled by ${host(r.prefill.worker)}` : r.pull && fetched(r.pull)] },
  { name: "Prompt", class: "number", text: (r) => number(r.prompt_tokens) },
  { name: "Predicted", class: "number", text: (r) => (r.decision ? share(r.decision.overlap_tokens, r.prompt_tokens) : "–") },
  { name: "Reported", class: "number", text: (r) => share(r.cached_tokens ?? 0, r.cached_tokens === null ? 0 : r.prompt_tokens) },
  { name: "Duration", class: "number", text: (r) => seconds(r.total_s) },
  { name: "Time line", class: "wide", text: () => "", bar: (r, longest) => [phases(r), longest, seconds] },
  { name: "Status", text: outcome },
];

export function requestTable(caption) {
  const link = (request) => `#requests/${encodeURIComponent(request.id)}`;
  return new Table(caption, COLUMNS, (request) => request.id, { link, scale: longest, nothing: "No requests yet." });
}

// The terms of a decision for each candidate: the same numbers as POST /route, stacked and in columns.
function decision(title, choice) {
  const cost = (each) => each.seconds?.cost ?? -each.probability;
  const candidates = choice.candidates.toSorted((a, b) => cost(a) - cost(b));
  const most = Math.max(...candidates.map(cost), 1e-9);
  const isPriced = candidates.some((each) => each.seconds);
  const ofTerms = isPriced ? Object.entries(TERMS) : [];
  const isChosen = (each) => each.worker === choice.worker && each.rank === choice.rank;
  const [chosen, next] = [candidates.find(isChosen), candidates.find((each) => !isChosen(each))];
  const cached = (each) => each.tokens_cached_or_in_flight ?? (each.overlap_blocks.external ?? 0) * choice.block_size;
  const table = new Table(
    `${title}: candidates`,
    [
      { name: "Candidate", text: (each) => [`${host(each.worker)}${each.rank ? ` rank ${each.rank}` : ""}`, ...(isChosen(each) ? ["chosen", "good"] : [])] },
      { name: "Cached or in flight", class: "number", text: (each) => number(cached(each)) },
      { name: isPriced ? "Cost" : "Probability", class: "number", text: (each) => (each.seconds ? seconds(each.seconds.cost) : `p ${each.probability.toFixed(2)}`) },
      ...(isPriced ? [{ name: "Cost terms", class: "wide", text: () => "", bar: (each) => [ofTerms.map(([name, term]) => [term, each.seconds[name]]), most, seconds] }] : []),
      ...ofTerms.map(([name, term]) => ({ name: term.replaceAll("-", " "), class: "number term", text: (each) => seconds(each.seconds[name]) })),
    ],
    (each) => `${each.worker} ${each.rank}`,
  );
  table.update(candidates);
  const others = choice.num_candidates - candidates.length;
  return [
    h("h3", {}, title),
    h("p", {}, `Policy ${choice.policy} chose ${host(choice.worker)}, which held ${number(choice.overlap_tokens)} of ${tokens(choice.prompt_tokens)}`, isPriced && next && `: ${seconds(cost(chosen))} there, ${seconds(cost(next))} at ${host(next.worker)}`, choice.untokenized_reason && `; ${choice.untokenized_reason}`, "."),
    isPriced && h("p", { class: "note" }, `The lowest cost wins. Utilisation ${share(choice.utilisation, 1)}; computing costs ${(1 + choice.price_of_computing).toFixed(2)} times its time.`),
    isPriced && legend(Object.values(TERMS)),
    table.element,
    others > 0 && h("p", { class: "note" }, `${others} more candidates cost more.`),
  ];
}

function details(request) {
  const values = {
    Ended: clock(request.at),
    Path: request.path,
    Model: request.model ?? "not named",
    Tenant: request.tenant,
    Outcome: outcome(request).slice(0, 2).filter(Boolean).join(": "),
    Attempts: number(request.num_attempts),
    Prompt: tokens(request.prompt_tokens),
    "Reported cached": request.cached_tokens === null ? "not reported" : tokens(request.cached_tokens),
    Answer: request.output_tokens === null ? "none" : tokens(request.output_tokens),
    ...Object.fromEntries(phases(request).filter(([, value]) => value > 0).map(([name, value]) => [name.replaceAll("-", " "), seconds(value)])),
  };
  return [
    bar(phases(request), request.total_s, seconds),
    legend(PHASES),
    request.decision ? decision("Answering worker", request.decision) : h("p", {}, "It was sent to no worker."),
    request.pull && h("p", {}, `Of the prompt, ${fetched(request.pull)}.`),
    request.prefill && decision("Prefill worker", request.prefill),
    facts(values),
    request.prompt && [h("h3", {}, "The prompt's end"), h("pre", {}, request.prompt)],
  ];
}

let table, limit, search, pause, more, detail, kept, counted, id, drawn, frozen, answer, models;

async function explain(event) {
  event.preventDefault();
  const asked = Object.fromEntries(new FormData(event.target));
  const text = asked.kind === "chat" ? { messages: [{ role: "user", content: asked.prompt }] } : { prompt: asked.prompt };
  try {
    const response = await ask("/route", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...(asked.model && { model: asked.model }), ...text }) });
    const plan = await response.json();
    if (!response.ok) throw new Error(plan.error.message);
    fill(
      answer,
      decision("Chosen worker", plan),
      plan.queued && h("p", {}, "It would wait for a worker with room."),
      plan.pull && h("p", {}, `Of the prompt, ${fetched(plan.pull)}.`),
      plan.local_prefill_reason && h("p", {}, `No separate prefill worker: ${plan.local_prefill_reason.replaceAll("_", " ")}.`),
      plan.prefill && decision("Chosen prefill worker", plan.prefill),
    );
  } catch (error) {
    fill(answer, h("p", { class: "mark bad" }, error.message));
  }
  answer.focus();
}

export default {
  name: "requests",
  title: "Requests",
  source: "requests",
  build() {
    table = requestTable("Requests");
    search = h("input", { type: "search", placeholder: "Id, worker, model or tenant", oninput: () => this.update(state) });
    pause = h("button", { type: "button", "aria-pressed": String(Boolean(frozen)), onclick: () => this.toggle() }, "Pause");
    limit = STEP;
    more = h("button", { type: "button", onclick: () => this.showMore() }, "Show more");
    counted = h("p", { class: "note" });
    kept = h("div");
    detail = new Detail("Request", "#requests", kept);
    models = h("select", { name: "model" });
    answer = h("section", { tabindex: "-1", "aria-label": "Explanation" });
    const kinds = h("select", { name: "kind" }, h("option", { value: "text" }, "as text"), h("option", { value: "chat" }, "as a chat"));
    const prompt = h("textarea", { name: "prompt", rows: "3", required: true, placeholder: "A prompt: where would it go? Nothing is sent." });
    const form = h("form", { class: "tools", onsubmit: explain }, field("Prompt", prompt), field("Model", models), field("Prompt format", kinds), h("button", {}, "Explain"));
    return [
      h("details", {}, h("summary", {}, h("h2", {}, "Explain a prompt")), form, answer),
      h("div", { class: "tools" }, field("Search", search), pause, legend(PHASES)),
      counted,
      detail.element,
      table.element,
      h("div", { class: "tools" }, more),
    ];
  },
  open(rest) {
    [id, drawn] = [rest, null];
    detail.show(id);
  },
  toggle() {
    frozen = frozen ? null : state.requests;
    pause.setAttribute("aria-pressed", String(Boolean(frozen)));
    this.update(state);
  },
  showMore() {
    limit += STEP;
    this.update(state);
  },
  update({ fleet, requests }) {
    const all = frozen ?? requests;
    const text = search.value.toLowerCase();
    const found = all.filter((each) => `${each.id} ${worker(each)} ${each.prefill?.worker ?? ""} ${each.model} ${each.tenant}`.toLowerCase().includes(text));
    table.update(found.slice(0, limit));
    more.hidden = found.length <= limit;
    const skipped = fleet.requests_skipped && `; ${number(fleet.requests_skipped)} others were not kept: more than 20 a second ended`;
    refill(counted, `${number(found.length)} of the last ${number(all.length)}${skipped || ""}.`);
    if (models.dataset.names !== fleet.models.join()) {
      fill(models, ["", ...fleet.models].map((name) => h("option", { value: name }, name || "any model")));
      models.dataset.names = fleet.models.join();
    }
    if (!id || drawn === id) return;
    const request = all.find((each) => each.id === id);
    if (request) drawn = id;
    fill(kept, request ? details(request) : h("p", {}, "This request is not, or no longer, among those kept."));
  },
};

// The state of the page, how it is kept up to date, and which view is shown.

import { fill, h } from "/ui/dom.js";
import fleet from "/ui/fleet.js";
import health from "/ui/health.js";
import prefixes from "/ui/prefixes.js";
import recorded, { timeBar } from "/ui/recorded.js";
import regret from "/ui/regret.js";
import requests from "/ui/requests.js";

const SILENCE_MS = 5000;
const MAX_REQUESTS = 1000;
const $ = (id) => document.getElementById(id);

export const state = { fleet: null, workers: new Map(), requests: [], prefixes: null, regret: null, clock: 0, arrived: 0, at: null };
const known = {};
let views = { fleet, requests, prefixes, regret, health };
let shown, stream, retryMs, isDue;

export const now = () => state.clock + (performance.now() - state.arrived) / 1000;

// Asks the router with the key of this session, if there is one; if the router refuses, the page asks for a key.
export async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401 || response.status === 403) {
    const { error } = await response.json();
    $("key-why").textContent = response.status === 401 && key ? "This is not, or no longer, the administrators' key." : error.message;
    $("key").hidden = false;
    throw new Refused("Not signed in");
  }
  $("key").hidden = true;
  return response;
}

class Refused extends Error {}

// Sets a text that screen readers announce, only if it has changed.
function setText(output, text) {
  if (output.textContent !== text) output.textContent = text;
}

function showConnection(text, kind) {
  setText($("connection"), text);
  $("connection").className = `connection ${kind}`;
}

function apply(news, view) {
  [state.clock, state.arrived, known[view]] = [news.now, performance.now(), news.number];
  if (news.is_whole) {
    state.workers.clear();
    if (view === "requests") state.requests = [];
  }
  const [before, fleet] = [state.fleet, news.fleet ?? state.fleet];
  const rate = before ? Math.max(0, fleet.dispatched - before.dispatched) / Math.max(0.1, news.now - before.at) : 0;
  state.fleet = { ...fleet, at: news.now, rate: 0.7 * (before?.rate ?? rate) + 0.3 * rate };
  for (const worker of news.workers) state.workers.set(worker.url, worker);
  if (news.requests?.length) state.requests = [...news.requests.reverse(), ...state.requests].slice(0, MAX_REQUESTS);
  state.prefixes = news.prefixes ?? state.prefixes;
  state.regret = news.regret ?? state.regret;
  if (fleet.recordings && state.at === null) showRecordings();
  draw();
}

function showRecordings() {
  [views, shown] = [{ fleet: recorded, prefixes }, null];
  document.querySelector("header").after(timeBar(state.fleet.end_ms));
  list();
  open();
}

export async function follow() {
  stream?.abort();
  const own = (stream = new AbortController());
  const view = shown.source;
  let watchdog;
  const resetWatchdog = () => {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => own.abort(), SILENCE_MS);
  };
  try {
    resetWatchdog();
    const response = await ask(`/ui/events?view=${view}&since=${known[view] ?? 0}${state.at === null ? "" : `&at=${state.at}`}`, { signal: own.signal });
    if (!response.ok) throw new Error(`the router answered ${response.status}`);
    let rest = "";
    for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
      resetWatchdog();
      retryMs = 500;
      const events = (rest + piece).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [name, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
        if (name === "state") {
          apply(JSON.parse(data), view);
          showConnection(state.at === null ? "Live" : "Recorded", "good");
        } else showConnection(JSON.parse(data).error?.message ?? "The router cannot reach its keeper process", "bad");
      }
    }
  } catch (error) {
    if (error instanceof Refused) {
      clearTimeout(watchdog);
      showConnection("A key is needed", "bad");
      return;
    }
  }
  clearTimeout(watchdog);
  if (own !== stream) return; // another one has taken over
  showConnection("Connection lost; trying again …", "bad");
  setTimeout(() => own === stream && follow(), retryMs);
  retryMs = Math.min(5000, retryMs * 1.5);
}

export function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const bad = state.fleet?.problems.filter((each) => each.until === null && each.is_bad).length ?? 0;
    document.title = `${bad ? `(${bad}) ` : ""}${shown.title} · Kvist`;
    if (views.health) $("views").querySelector("[href='#health']").dataset.count = bad || "";
    setText($("wrong"), bad ? `${bad} wrong: see Health` : "");
    if (state.fleet) shown.update(state);
  });
}

// Shows the view that the address names; the focus follows a link, and returns to it when its detail is closed.
function open(event) {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const [view, before, key] = [views[name] ?? views.fleet, shown, rest.map(decodeURIComponent).join("/")];
  for (const link of $("views").children) {
    if (link.hash === `#${view.name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const [main, source] = [$("main"), before?.source];
  if (view !== before) fill(main, h("h1", { class: "unseen", tabindex: "-1" }, view.title), view.build());
  shown = view;
  view.open?.(key);
  if (event && key) main.querySelector(".detail h2")?.focus();
  else if (event) (view === before ? linkTo(new URL(event.oldURL).hash) : main.querySelector("h1"))?.focus();
  draw();
  if (view.source !== source || !stream) {
    retryMs = 500;
    follow();
  }
}

export const linkTo = (hash) => [...$("main").querySelectorAll("a")].find((link) => link.hash === hash);
const list = () => fill($("views"), Object.values(views).map((view) => h("a", { href: `#${view.name}` }, view.title)));

list();
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", new FormData(event.target).get("key"));
  event.target.reset();
  follow();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  $("main").focus();
});
addEventListener("hashchange", open);
open();

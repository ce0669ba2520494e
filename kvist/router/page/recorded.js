// Recordings: how much each rank held at the moment that the slider sets, and how that grew.

import { follow, state } from "/ui/app.js";
import { Chart } from "/ui/chart.js";
import { Table, exact, field, h, number, refill, share, tile } from "/ui/dom.js";

const STEPS = 200; // of playing it all
const moment = (seconds) => `${exact(seconds)} s`; // as flags say it
const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);

const COLUMNS = [
  { name: "Worker", value: (r) => r.key, text: (r) => [r.worker, r.rank ? `rank ${r.rank}` : null] },
  { name: "Recording", value: (r) => r.recording, text: (r) => r.recording },
  { name: "Blocks", class: "number", value: (r) => sum(r.tiers), text: (r) => [number(sum(r.tiers)), `of ${number(r.peak)} at most`], bar: (r) => [[["fill", sum(r.tiers)]], r.peak || 1] },
];

let slider, shownTime, timer, table, tiles, charts;

function seek(at) {
  slider.value = at;
  state.at = slider.valueAsNumber;
  shownTime.textContent = moment(state.at / 1000);
  follow();
}

function play(event) {
  const button = event.target;
  clearInterval(timer);
  timer = button.textContent === "Play" && setInterval(step, 250);
  button.textContent = timer ? "Stop" : "Play";
  if (state.at >= slider.max) seek(0);
  function step() {
    seek(state.at + slider.max / STEPS);
    if (state.at >= slider.max) play(event);
  }
}

// The time slider above every view of recordings, which last so many milliseconds.
export function timeBar(endMs) {
  state.at = endMs;
  slider = h("input", { type: "range", min: 0, max: endMs, value: endMs, oninput: () => seek(slider.value) });
  shownTime = h("output", {}, moment(endMs / 1000));
  return h("section", { class: "banner time", "aria-label": "Time" }, h("button", { type: "button", onclick: play }, "Play"), field("Time since the beginning", slider), shownTime);
}

export default {
  name: "fleet",
  title: "Fleet",
  source: "fleet",
  build() {
    const [{ curves, tiers: names }] = state.fleet.recordings;
    const counts = names.map((tier) => ({ name: tier, class: "number", value: (r) => r.tiers[tier], text: (r) => number(r.tiers[tier]) }));
    table = new Table("Ranks", [...COLUMNS, ...counts], (rank) => rank.key, { sort: "Worker" });
    tiles = h("dl", { class: "tiles" });
    charts = Object.keys(curves).map((name) => [name, new Chart(`${name}, of the whole recording`, exact, moment, { height: 180 })]);
    return [tiles, charts.map(([name, chart]) => [h("h2", {}, name), chart.element]), h("h2", {}, "Held then"), table.element];
  },
  update({ fleet: { recordings, end_ms }, at }) {
    const held = (recording) => sum(recording.ranks.map((rank) => sum(rank.tiers)));
    refill(
      tiles,
      recordings.map((each) => [
        tile("Recording", moment(each.duration_s), `${each.name}, from ${new Date(each.began_at * 1000).toLocaleString()}`),
        tile("Held", number(held(each)), "blocks, one for each rank and tier"),
        tile("Distinct", number(each.distinct), `${share(each.placed, each.distinct)} with a place in the tree`),
      ]),
    );
    for (const [name, chart] of charts) {
      const curves = recordings.map((each) => new Map(each.curves[name]));
      const times = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].toSorted((a, b) => a - b);
      chart.update(times, curves.map((curve, place) => [recordings[place].name, times.map((time) => curve.get(time))]), 0, end_ms / 1000, at / 1000);
    }
    table.update(recordings.flatMap((each) => each.ranks.map((rank) => ({ ...rank, recording: each.name, key: `${rank.worker} ${rank.rank} ${each.name}` }))));
  },
};

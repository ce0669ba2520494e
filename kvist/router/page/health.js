// The problems of the fleet, the newest first.

import { now } from "/ui/app.js";
import { clock, count, duration, h, host, refill } from "/ui/dom.js";

let list, calm;

function item(problem) {
  const isOver = problem.until !== null;
  const kind = isOver ? "over" : problem.is_bad ? "bad" : "warn";
  const when = isOver
    ? `${clock(problem.since)} to ${clock(problem.until)}`
    : `since ${clock(problem.since)}, for ${duration(now() - problem.since)}`;
  return h(
    "li",
    { class: isOver ? "over" : "", "data-key": `${problem.where} ${problem.what}` },
    h("p", {}, h("span", { class: `mark ${kind}` }, isOver ? "over" : problem.is_bad ? "problem" : "note"), " ", h("strong", {}, host(problem.where)), ` ${problem.what}`),
    problem.why && h("p", {}, problem.why),
    h("p", { class: "note" }, `${when} · explained in `, h("code", {}, problem.page)),
  );
}

export default {
  name: "health",
  title: "Health",
  source: "health",
  build() {
    list = h("ol", { class: "problems" });
    calm = h("p", { class: "calm" });
    return [calm, list];
  },
  update({ fleet }) {
    const open = fleet.problems.filter((each) => each.until === null).length;
    refill(calm, open ? count(open, "problem") : "No problems.");
    calm.className = `calm mark ${open ? "bad" : "good"}`;
    refill(list, fleet.problems.toSorted((a, b) => (a.until !== null) - (b.until !== null) || b.since - a.since).map(item));
  },
};

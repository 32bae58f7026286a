"use strict";
// Asks the server for the parts of the page every few seconds and puts in those that changed.
const EVERY_MS = 3000;
const el = (id) => document.getElementById(id);
const tags = {};
const wanted = {};
let runs = [];
let ticked = new Set();
let page = 0;
const chosen = () => new URLSearchParams(location.hash.slice(1)).get("run") || runs[0]?.name;
const together = () => el("overlay").getAttribute("aria-pressed") === "true" && ticked.size > 1;

async function part(id, address) {
  const same = tags[id]?.address === address;
  wanted[id] = address;
  const reply = await fetch(address, { headers: same ? { "If-None-Match": tags[id].tag } : {}, cache: "no-store" });
  if (reply.status === 304) return false;
  const text = await reply.text();
  if (wanted[id] !== address) return false; // something else was chosen meanwhile
  if (!reply.ok) { el(id).textContent = text; delete tags[id]; return true; }
  tags[id] = { address, tag: reply.headers.get("ETag") };
  const open = [...el(id).querySelectorAll("details")].map((details) => details.open);
  el(id).innerHTML = text;
  if (same) el(id).querySelectorAll("details").forEach((details, place) => { if (place in open) details.open = open[place]; });
  return true;
}

function list() {
  const nodes = runs.map((run) => {
    const row = document.createElement("div");
    row.className = "row";
    const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: ticked.has(run.name), title: "compare" });
    box.setAttribute("aria-label", `compare ${run.name}`);
    box.onchange = () => { box.checked ? ticked.add(run.name) : ticked.delete(run.name); show(); };
    const link = Object.assign(document.createElement("a"), { href: `#run=${encodeURIComponent(run.name)}`, className: run.name === chosen() ? "here" : "" });
    const total = run.total ? ` of ${run.total}` : "";
    const detail = Object.assign(document.createElement("span"), { className: "small soft", textContent: `${run.steps}${total} steps, reward ${run.reward || "–"}` });
    const chip = Object.assign(document.createElement("span"), { className: `small t-${run.hue}`, textContent: run.state });
    link.append(Object.assign(document.createElement("span"), { className: "name", textContent: run.name }), chip);
    if (run.alarms) link.append(Object.assign(document.createElement("span"), { className: "small t-rose", textContent: `${run.alarms} to look at` }));
    link.append(detail);
    row.append(box, link);
    return row;
  });
  el("runs").replaceChildren(...(nodes.length ? nodes : [Object.assign(document.createElement("p"), { className: "none", textContent: "no run here yet" })]));
}

function files() {
  const run = runs.find((one) => one.name === chosen());
  const names = run?.files || [];
  const select = el("pick-file");
  if (select.dataset.list === names.join()) return;
  const followed = !select.value || select.selectedIndex === 0;
  const before = select.value;
  select.dataset.list = names.join();
  select.replaceChildren(...names.map((name) => new Option(name.replace("_", " "), name)));
  if (!followed && names.includes(before)) select.value = before;
}

async function samples() {
  const file = el("pick-file").value;
  el("sample-card").hidden = !file || together();
  if (el("sample-card").hidden) return;
  const query = new URLSearchParams({ run: chosen(), file, q: el("pick-text").value, reward: el("pick-reward").value, page });
  await part("samples", `/samples?${query}`);
  const shown = el("samples").firstElementChild;
  el("found").textContent = shown?.dataset.found || "";
  el("previous").disabled = page === 0;
  el("next").disabled = shown?.dataset.more !== "yes";
}

async function show() {
  try {
    runs = await (await fetch("/runs", { cache: "no-store" })).json();
    list();
    files();
    if (runs.length) {
      if (together()) await part("view", `/overlay?${new URLSearchParams([...ticked].map((name) => ["run", name]))}`);
      else await part("view", `/view?${new URLSearchParams({ run: chosen() })}`);
    }
    await part("gpu", "/gpu");
    await samples();
    el("beat").textContent = "live";
    el("beat").className = "small t-green";
  } catch (error) {
    el("beat").textContent = `no answer: ${error.message}`;
    el("beat").className = "small t-rose";
  }
}

addEventListener("hashchange", () => { page = 0; el("pick-file").value = ""; scrollTo(0, 0); show(); });
el("overlay").onclick = () => {
  el("overlay").setAttribute("aria-pressed", String(el("overlay").getAttribute("aria-pressed") !== "true"));
  show();
};
for (const id of ["pick-text", "pick-reward", "pick-file"]) el(id).oninput = () => { page = 0; samples(); };
el("previous").onclick = () => { page -= 1; samples(); };
el("next").onclick = () => { page += 1; samples(); };
async function follow() { await show(); setTimeout(follow, EVERY_MS); }
follow();

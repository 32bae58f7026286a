"use strict";
// Theme, and the values of a chart under the pointer. Charts carry their numbers in data-chart.
const root = document.documentElement;
try { if (localStorage.getItem("theme")) root.dataset.theme = localStorage.getItem("theme"); } catch { /* a file page may have no storage */ }
document.addEventListener("click", (event) => {
  if (event.target.id !== "theme") return;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept */ }
});
const tip = document.createElement("div");
tip.id = "tip";
document.body.append(tip);
let pointer = null;
function leave() { tip.style.display = "none"; tip.replaceChildren(); pointer?.remove(); pointer = null; }
document.addEventListener("mousemove", (event) => {
  const chart = event.target.closest?.("svg[data-chart]");
  if (!chart) return leave();
  const data = JSON.parse(chart.dataset.chart);
  const box = chart.getBoundingClientRect();
  const [left, right, low, high] = data.x;
  const at = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
  const wanted = low + (at - left) / (right - left) * (high - low);
  let step = null;
  const rows = data.lines.map((line) => {
    const near = line.points.reduce((best, point) => Math.abs(point[0] - wanted) < Math.abs(best[0] - wanted) ? point : best);
    if (step === null || Math.abs(near[0] - wanted) < Math.abs(step - wanted)) step = near[0];
    return [line, near];
  });
  leave();
  tip.append(Object.assign(document.createElement("div"), { textContent: `step ${step}`, className: "soft" }));
  for (const [line, point] of rows) {
    if (point[0] !== step) continue;
    const row = Object.assign(document.createElement("div"), { textContent: `${line.label}: ${point[1]}`, className: `t-${line.hue}` });
    tip.append(row);
  }
  pointer = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const x = left + (high === low ? 0 : (step - low) / (high - low) * (right - left));
  for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 8, y2: chart.viewBox.baseVal.height - 22, class: "pointer" })) pointer.setAttribute(name, value);
  chart.append(pointer);
  tip.style.display = "block";
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
});

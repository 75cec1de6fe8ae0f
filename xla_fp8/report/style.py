"""The look of HTML reports, and the script of the page: what a clicked box shows."""

from __future__ import annotations

STYLE = """
.xla-fp8 { --line: #d9dde3; --soft: #5d6778; --good: #1a7f4b; --bad: #b42318; --plain: #667085; --code: #f4f6f8;
  --paper: #fff; --ink: #1d2330; --link: #1a56c4; --hit: #fff3bf;
  --operand: #e8eaed; --instruction: #fff4d6; --node: #d7e8ff; --result: #d9f2e0; --user: #fff;
  color: var(--ink); background: var(--paper); font: 14px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .xla-fp8 { --line: #353b45; --soft: #98a2b3; --good: #4ac285; --bad: #f97066;
  --plain: #98a2b3; --code: #20252d; --paper: #14181e; --ink: #e6e9ee; --link: #84adff; --hit: #4d4420;
  --operand: #2b3038; --instruction: #3f3820; --node: #1f3550; --result: #1e3d2b; --user: #14181e; } }
.xla-fp8 code, .xla-fp8 pre { font: 12.5px/1.5 ui-monospace, monospace; }
.xla-fp8 code { overflow-wrap: anywhere; }
.xla-fp8 a { color: var(--link); text-decoration: none; } .xla-fp8 a:hover { text-decoration: underline; }
.xla-fp8 table { border-collapse: collapse; }
.xla-fp8 th, .xla-fp8 td { border-bottom: 1px solid var(--line); padding: .3rem .9rem .3rem 0; text-align: left; }
.xla-fp8 th { color: var(--soft); font-weight: 600; font-size: 12px; }
.xla-fp8 .bar { display: inline-block; height: .7em; background: var(--plain); border-radius: 2px; }
.xla-fp8 .rewritten .bar { background: var(--good); }
.xla-fp8 p { margin: .3rem 0; }
.xla-fp8 .summary { font-size: 16px; margin: 0; }
.xla-fp8 .target, .xla-fp8 .note, .xla-fp8 .rule, .xla-fp8 .callers { color: var(--soft); }
.xla-fp8 .entry { border: 1px solid var(--line); border-left: 4px solid var(--plain); border-radius: 6px;
  padding: .5rem .9rem; margin: .7rem 0; content-visibility: auto; contain-intrinsic-size: auto 20rem; }
.xla-fp8 .entry.rewritten { border-left-color: var(--good); } .xla-fp8 .entry.refused { border-left-color: var(--bad); }
.xla-fp8 .entry:target { outline: 2px solid var(--link); }
.xla-fp8 .status { font-weight: 600; margin-right: .6rem; color: var(--plain); }
.xla-fp8 .rewritten .status { color: var(--good); } .xla-fp8 .refused .status { color: var(--bad); }
.xla-fp8 .where { float: right; color: var(--soft); }
.xla-fp8 .graph { background: var(--code); border-radius: 4px; padding: .1rem .35rem; }
.xla-fp8 .pictures { display: flex; flex-wrap: wrap; gap: 1.5rem; align-items: flex-start; margin-top: .4rem; }
.xla-fp8 .pictures > div, .xla-fp8 .overview { overflow: auto; max-width: 100%; }
.xla-fp8 .overview { max-height: 70vh; border: 1px solid var(--line); border-radius: 6px; padding: .4rem; }
.xla-fp8 .overview svg { display: block; margin: auto; }
.xla-fp8 .pictures h4 { margin: .2rem 0; color: var(--soft); font-weight: 600; font-size: 12px; }
.xla-fp8 summary { cursor: pointer; color: var(--soft); }
.xla-fp8 pre.source { margin: .4rem 0; background: var(--code); border-radius: 6px; padding: .3rem 0;
  overflow-x: auto; }
.xla-fp8 pre.source span { display: block; padding: 0 .7rem; white-space: pre; }
.xla-fp8 pre.source span:target, .xla-fp8 pre.source .hit { background: var(--hit); }
.xla-fp8 pre.source i { font-style: normal; color: var(--soft); display: inline-block; width: 3.5em;
  user-select: none; }
.xla-fp8 svg.flow text { font: 12px ui-monospace, monospace; text-anchor: middle; fill: var(--ink); }
.xla-fp8 svg.flow text.detail { font-size: 11px; fill: var(--soft); }
.xla-fp8 svg.flow rect { stroke: var(--soft); fill: var(--user); }
.xla-fp8 svg.flow path { fill: none; stroke: var(--soft); }
.xla-fp8 svg.flow path.far { opacity: .2; }
.xla-fp8 svg.flow path.tip { fill: var(--soft); stroke: none; }
.xla-fp8 svg.flow a:hover rect, .xla-fp8 svg.flow a:focus rect { stroke: var(--link); stroke-width: 2; }
.xla-fp8 svg.flow .operand rect, .xla-fp8 svg.flow .other rect { fill: var(--operand); }
.xla-fp8 svg.flow .instruction rect { fill: var(--instruction); }
.xla-fp8 svg.flow .node rect { fill: var(--node); }
.xla-fp8 svg.flow .result rect, .xla-fp8 svg.flow .rewritten rect { fill: var(--result); }
.xla-fp8 svg.flow .refused rect, .xla-fp8 svg.flow .marked rect { stroke: var(--bad); stroke-width: 2.5; }
.xla-fp8 svg.flow .own rect { stroke: var(--ink); stroke-width: 2; }
"""
"""Of the page and of what a notebook shows."""

PAGE_STYLE = """
body.xla-fp8 { margin: 2rem auto; max-width: 80rem; padding: 0 1.5rem 8rem; }
.xla-fp8 h1 { font-size: 22px; } .xla-fp8 h2 { font-size: 17px; margin-top: 2rem; }
.xla-fp8 h3 { font-size: 14px; margin: 1.2rem 0 .3rem; overflow-wrap: anywhere; }
.xla-fp8 #inspector { position: fixed; right: 1rem; bottom: 1rem;
  width: min(40rem, calc(100vw - 2rem)); max-height: 60vh;
  overflow: auto; background: var(--paper); border: 1px solid var(--soft); border-radius: 8px; padding: .7rem 1rem;
  box-shadow: 0 4px 24px rgb(0 0 0 / .25); box-sizing: border-box; }
.xla-fp8 #inspector[hidden] { display: none; }
.xla-fp8 #inspector button { float: right; font: inherit; color: var(--soft); background: none;
  border: 0; cursor: pointer; }
.xla-fp8 #inspector pre.hlo { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
"""

SCRIPT = """
"use strict";
(() => {
  const panel = document.getElementById("inspector");
  const part = (name) => panel.querySelector("." + name);
  const link = (element, id, text) => {
    element.hidden = !id;
    if (id) { element.href = "#" + id; element.textContent = text; }
  };
  const title = (id) => document.getElementById(id).dataset.title;
  const excerpt = (id) => {
    const lines = [...document.getElementById(id).parentElement.children];
    const at = lines.findIndex((line) => line.id === id);
    return lines.slice(Math.max(0, at - 4), at + 5).map((line) => {
      const copy = line.cloneNode(true);
      copy.removeAttribute("id");
      copy.classList.toggle("hit", line.id === id);
      return copy;
    });
  };
  const close = () => { panel.hidden = true; };
  document.addEventListener("click", (event) => {
    const box = event.target.closest("a[data-hlo]");
    if (!box) return;
    event.preventDefault();
    const data = box.dataset;
    part("hlo").textContent = data.hlo;
    link(part("to-entry"), data.entry, data.entry && "report: " + title(data.entry));
    link(part("to-source"), data.source, data.at);
    part("at").textContent = data.source ? "" : data.at || "";
    part("source").replaceChildren(...(data.source ? excerpt(data.source) : []));
    part("source").hidden = !data.source;
    panel.hidden = false;
  });
  part("close").addEventListener("click", close);
  for (const overview of document.querySelectorAll(".overview")) {
    const first = overview.querySelector("rect").getBoundingClientRect();
    overview.scrollLeft = first.x + first.width / 2 - overview.getBoundingClientRect().x - overview.clientWidth / 2;
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
})();
"""

INSPECTOR = (
    '<aside id="inspector" aria-label="the clicked box" hidden><button type="button" class="close">close</button>'
    '<pre class="hlo"></pre><p><a class="to-entry" href="#"></a> <a class="to-source" href="#"></a> '
    '<span class="at"></span></p><pre class="source"></pre></aside>\n'
)
"""The panel that the script fills. Without a script a click goes straight to the entry or the source line."""

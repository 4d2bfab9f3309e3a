"""Renders a report as one HTML file that loads nothing else: a timeline, a map of regions, and tables."""

from __future__ import annotations

import json
from typing import Any

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #1c1c1c; }
h1 { font-size: 20px } h2 { font-size: 16px; margin-top: 28px }
table { border-collapse: collapse } td, th { padding: 3px 12px 3px 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } tr:nth-child(even) { background: #f5f5f5 }
code { font-size: 13px } .advice { color: #666 } .lane { font-size: 12px; fill: #444 }
svg { background: #fafafa; display: block } rect:hover { stroke: #000 }
#map { display: flex; height: 72px; width: 100% }
#map a { overflow: hidden; font-size: 11px; padding: 2px; border-right: 1px solid #fff; box-sizing: border-box;
  color: inherit; text-decoration: none } tr:target { outline: 2px solid #4e79a7 }
nav a { display: inline-block; margin-right: 14px }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent);
const colors = ['#4e79a7', '#f28e2b', '#59a14f', '#e15759', '#b07aa1', '#9c755f', '#76b7b2', '#edc948'];
const color = text => colors[[...text].reduce((h, c) => (h * 31 + c.charCodeAt(0)) >>> 0, 7) % colors.length];
function make(tag, attributes, text, space) {
  const e = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attributes || {})) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  return e;
}
const svgSpace = 'http://www.w3.org/2000/svg';
let from = 0, to = Math.max(1, data.wall_ms);
function drawTimeline() {
  const svg = document.getElementById('timeline'), width = svg.clientWidth || 1000, left = 70;
  svg.replaceChildren();
  const x = t => left + (t - from) / (to - from) * (width - left);
  Object.entries(data.timeline).forEach(([lane, bars], i) => {
    const y = 8 + i * 30;
    svg.append(make('text', { x: 4, y: y + 15, class: 'lane' }, lane, svgSpace));
    for (const [begin, end, label] of bars) {
      if (end < from || begin > to) continue;
      const a = Math.max(left, x(begin)), b = Math.max(a + 0.5, Math.min(width, x(end)));
      const bar = make('rect', { x: a, y: y, width: b - a, height: 20, fill: color(label), 'data-lane': lane },
        undefined, svgSpace);
      bar.append(make('title', {}, lane + ': ' + label + ', ' + (end - begin).toFixed(3) + ' ms', svgSpace));
      svg.append(bar);
    }
  });
  document.getElementById('range').textContent = from.toFixed(1) + ' to ' + to.toFixed(1) + ' ms';
}
function zoom(event) {
  event.preventDefault();
  const box = event.currentTarget.getBoundingClientRect();
  const at = from + (to - from) * Math.min(1, Math.max(0, (event.clientX - box.left - 70) / (box.width - 70)));
  const scale = event.deltaY > 0 ? 1.25 : 0.8;
  from = Math.max(0, at - (at - from) * scale);
  to = Math.min(Math.max(1, data.wall_ms), at + (to - at) * scale);
  drawTimeline();
}
function drawMap() {
  const map = document.getElementById('map');
  const total = data.regions.reduce((sum, r) => sum + r.device_ms, 0) || 1;
  for (const r of data.regions) {
    const box = make('a', { style: `flex: ${Math.max(r.device_ms / total, 0.004)}; background: ${color(r.region)}33`,
      href: '#region-' + r.region, title: JSON.stringify(r.most_used) + ' ' + JSON.stringify(r.cut) });
    box.textContent = `${r.region} ${r.ops} ops, ${r.launches} x, ${r.device_ms.toFixed(1)} ms, ${r.first_line}`;
    map.append(box);
  }
}
function table(id, rows, columns) {
  const t = document.getElementById(id);
  if (!rows.length) { t.append(make('caption', {}, 'none')); return; }
  const head = make('tr');
  for (const [name] of columns) head.append(make('th', {}, name));
  t.append(head);
  for (const row of rows) {
    const line = make('tr', row.region ? { id: 'region-' + row.region } : {});
    for (const [, value] of columns) {
      const v = value(row);
      line.append(make('td', typeof v === 'number' ? { class: 'number' } : {},
        typeof v === 'number' ? (Number.isInteger(v) ? v : v.toFixed(2)) : v));
    }
    t.append(line);
  }
}
const steps = data.steps;
document.getElementById('summary').textContent =
  `${data.wall_ms.toFixed(0)} ms, ${data.launches} launches of ${data.regions.length} regions; ${steps.count} x ` +
  `${steps.unit}: device working ${(100 * steps.device_bound).toFixed(0)} %, waiting for the host ` +
  `${(100 * steps.host_bound).toFixed(0)} %`;
table('recompilations', data.recompilations, [
  ['line', r => r.difference.line], ['op', r => r.difference.op], ['argument', r => r.difference.argument],
  ['what', r => r.difference.what], ['before', r => r.difference.before], ['after', r => r.difference.after],
  ['build ms', r => r.build_ms], ['what to do', r => r.difference.advice]]);
table('fallbacks', data.fallbacks, [['op', r => r.op], ['dtype', r => r.dtype], ['line', r => r.line],
  ['count', r => r.count], ['bytes', r => r.bytes], ['what to do', r => r.advice]]);
table('reads', data.reads, [['line', r => r.line], ['count', r => r.count], ['waited ms', r => r.waited_ms],
  ['bytes', r => r.bytes], ['what to do', r => r.advice]]);
table('tiers', data.tiers, [['tier', r => r.tier], ['programs', r => r.programs], ['build ms', r => r.build_ms],
  ['launches', r => r.launches], ['device ms', r => r.device_ms]]);
table('regions', data.regions, [['region', r => r.region], ['first line', r => r.first_line], ['ops', r => r.ops],
  ['tier', r => r.tier],
  ['launches', r => r.launches], ['device ms', r => r.device_ms],
  ['cut', r => Object.entries(r.cut).map(([k, n]) => `${k} (${n} x)`).join(', ')]]);
table('builds', data.builds, [['at ms', r => r.at_ms], ['from', r => r.source], ['ms', r => r.build_ms],
  ['ops', r => r.ops], ['line', r => r.line]]);
table('memory', data.memory, [['bytes', r => r.bytes], ['count', r => r.count], ['op', r => r.op],
  ['line', r => r.line]]);
table('room', data.room, [['count', r => r.count], ['action', r => r.action], ['line', r => r.line],
  ['last time', r => r.last]]);
table('bailouts', data.bailouts, [['optimisation', r => r.optimisation], ['line', r => r.line],
  ['cause', r => r.cause]]);
table('not_padded', data.not_padded, [['count', r => r.count], ['line', r => r.line], ['cause', r => r.cause]]);
drawTimeline();
drawMap();
document.getElementById('timeline').addEventListener('wheel', zoom, { passive: false });
document.getElementById('timeline').addEventListener('dblclick', () => {
  from = 0; to = Math.max(1, data.wall_ms); drawTimeline();
});
addEventListener('resize', drawTimeline);
document.body.dataset.state = 'drawn';
"""

_SECTIONS = (
    ("recompilations", "Recompilations"),
    ("fallbacks", "Ops that ran on the CPU"),
    ("reads", "Reads that waited"),
    ("tiers", "Tiers"),
    ("regions", "Regions"),
    ("builds", "Builds"),
    ("memory", "Largest live results"),
    ("room", "For want of memory"),
    ("bailouts", "Optimisations that failed"),
    ("not_padded", "Regions compiled for each of their sizes"),
)


def render(data: dict[str, Any]) -> str:
    """The page of a report."""
    tables = "\n".join(f'<h2 id="{name}-title">{title}</h2><table id="{name}"></table>' for name, title in _SECTIONS)
    links = "".join(f'<a href="#{name}-title">{title}</a>' for name, title in _SECTIONS)
    embedded = json.dumps(data).replace("<", "\\u003c")  # a source line may hold a closing tag
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>torchtpu explain</title><style>{_STYLE}</style></head><body>
<h1>torchtpu explain</h1><p id="summary"></p><nav>{links}</nav>
<h2>Timeline <small id="range"></small></h2><svg id="timeline" width="100%" height="190"></svg>
<h2>Region map</h2><div id="map"></div>
{tables}
<script type="application/json" id="data">{embedded}</script>
<script>{_SCRIPT}</script>
</body></html>
"""

"""The template of the report's page (jinja2, autoescaped)."""

from __future__ import annotations

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ report.verdict.value }}: {{ report.settings.model }}</title>
<style>
:root { color-scheme: light; }
body { margin: 0 auto; padding: 1.2rem; max-width: 60rem; background: #fff; color: #1b1f24;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #d7dde3; padding-bottom: .2rem; }
p { margin: .5rem 0; }
.verdict { border-left: .5rem solid; padding: .7rem 1rem; background: #f6f8fa; }
.verdict strong { display: block; font-size: 1.6rem; letter-spacing: .03em; }
.LOSSLESS { border-color: #1a7f37; } .LOSSLESS strong { color: #1a7f37; }
.BIASED { border-color: #b3261e; } .BIASED strong { color: #b3261e; }
.INCONCLUSIVE { border-color: #9a6700; } .INCONCLUSIVE strong { color: #9a6700; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid #e6eaee; }
th { font-weight: 600; }
th:first-child, td:last-child { min-width: 6.2rem; }
thead th { border-bottom: 2px solid #d7dde3; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.place { white-space: nowrap; }
tr.part th { padding-left: 1.1rem; font-weight: 400; }
.bad { color: #b3261e; font-weight: 600; }
code { font-size: .88em; overflow-wrap: anywhere; }
figure { margin: .8rem 0; break-inside: avoid; }
figure img { width: 100%; height: auto; display: block; }
figcaption, .note { font-size: .85rem; color: #57606a; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
@media (max-width: 34rem) { body { padding: .8rem; font-size: 15px; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } .scroll { overflow: visible; } h2 { break-after: avoid; }
  .figures { grid-template-columns: 1fr 1fr; } tr { break-inside: avoid; }
  .verdict { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
</style>
</head>
<body>
<h1>Does speculative decoding change the answers of {{ report.settings.model }}?</h1>
<div class="verdict {{ report.verdict.value }}"><strong>{{ report.verdict.value }}</strong>
{{ report.reason[:1] | upper }}{{ report.reason[1:] }}</div>

<h2>The tests</h2>
<div class="scroll"><table>
<thead><tr><th scope="col">Test</th><th scope="col">Figures</th><th scope="col">Verdict</th></tr></thead>
<tbody>
{% for row in rows %}
<tr{% if row.part %} class="part"{% endif %}><th scope="row">{{ row.test }}</th><td>{{ row.figure }}</td>
<td{% if row.bad %} class="bad"{% endif %}>{{ row.verdict }}</td></tr>
{% endfor %}
</tbody></table></div>
<p class="note">Alpha is {{ report.settings.alpha }} for the whole run, of which the martingale may spend
{{ '%.2g' | format(report.martingale.alpha) }}{% if report.chi_square %} and the chi-square
{{ '%.2g' | format(report.chi_square.alpha) }}{% endif %}: the probability that a lossless engine is called biased by either.</p>

{% macro figure(plot) %}
<figure><img src="{{ plot.source }}" alt="{{ plot.alt }}"><figcaption>{{ plot.caption }}</figcaption></figure>
{% endmacro %}
<h2>Evidence against losslessness, token by token</h2>
{{ figure(path) }}

{% if places %}
<h2>Where it sits</h2>
<p class="note">How often a token fell into a set that was chosen before the draft was looked at. Grey spans two standard
deviations to each side of what a lossless engine does; a dot beyond four is red.</p>
<div class="figures">
{% for plot in places %}
{{ figure(plot) }}
{% endfor %}
</div>
<div class="scroll"><table>
<thead><tr><th scope="col">Set</th><th scope="col">Place</th><th scope="col" class="number">Tokens</th>
<th scope="col" class="number">Observed</th><th scope="col" class="number">Expected</th><th scope="col" class="number">z</th>
<th scope="col" class="number">Own e-value</th></tr></thead>
<tbody>
{% for place in report.martingale.places %}
<tr><td>{{ sets[place.set] }}</td><td class="place">{{ place.place }}</td>
<td class="number">{{ '{:,}'.format(place.tokens) }}</td>
<td class="number">{{ '{:.3%}'.format(place.observed / place.tokens) }}</td>
<td class="number">{{ '{:.3%}'.format(place.expected / place.tokens) }}</td>
<td class="number{% if place.z | abs > far %} bad{% endif %}">{{ '{:+.2f}'.format(place.z) }}</td>
<td class="number">{{ e_value(place.log10_e) }}</td></tr>
{% endfor %}
</tbody></table></div>
<p class="note">These are many looks at the same tokens: they show where a bias sits, the table of tests whether there is one.</p>
{% endif %}

{% if report.chi_square %}
<h2>First tokens</h2>
{% if bins %}
{{ figure(bins) }}
{% endif %}
<p>Chi-square {{ '{:.1f}'.format(report.chi_square.statistic) }} on {{ '{:,}'.format(report.chi_square.degrees) }} degrees of
freedom, p = {{ '{:.2g}'.format(report.chi_square.p_value) }}.
{% if report.chi_square.detectable is not none %}
With probability {{ '{:.2f}'.format(report.chi_square.power_asked) }} it finds a total variation of
{{ percent(report.chi_square.detectable) }}, if {{ report.chi_square.alternative }}.
{% else %}
No bias of any size is found with probability {{ '{:.2f}'.format(report.chi_square.power_asked) }}: there were too few samples.
{% endif %}
{% if report.chi_square.noncentrality %}
Rounding between the engines is granted a noncentrality of {{ '{:.2g}'.format(report.chi_square.noncentrality) }}.
{% endif %}</p>
{% if report.chi_square.impossible %}
<p class="bad">Sampled though their probability is 0:
{% for item in report.chi_square.impossible[:20] %}
{{ item.label }}, token {{ item.token }} ({{ item.observed }}){{ '; ' if not loop.last }}
{% endfor %}</p>
{% endif %}
{% endif %}

{% if report.greedy %}
<h2>Greedy outputs that differ</h2>
{% if report.greedy.mismatches %}
<div class="scroll"><table>
<thead><tr><th scope="col">Prompt</th><th scope="col" class="number">From token</th><th scope="col">Plain</th>
<th scope="col">Speculative</th><th scope="col">Cause</th><th scope="col">Explanation</th></tr></thead>
<tbody>
{% for prompt, at in report.greedy.mismatches %}
<tr><td>{{ prompt }}</td><td class="number">{{ at.position }}</td><td><code>{{ at.plain_text }}</code></td>
<td><code>{{ at.tested_text }}</code></td><td{% if at.cause.value == 'bug' %} class="bad"{% endif %}>{{ at.cause.value }}</td>
<td>{{ at.explanation }}</td></tr>
{% endfor %}
</tbody></table></div>
{% else %}
<p>None: all {{ report.greedy.prompts | length }} are equal, token by token.</p>
{% endif %}
<p class="note">Numeric noise: the two runs give log-probabilities of the same token after the same prefix that differ by up to
{{ '{:.2g}'.format(report.greedy.noise) }} nats ({{ '{:,}'.format(report.greedy.compared) }} compared). Two tokens within twice
that can change places.</p>
{% endif %}

<h2>Not tested</h2>
{% if report.not_tested %}
<ul>
{% for sentence in report.not_tested %}
<li>{{ sentence }}</li>
{% endfor %}
</ul>
{% else %}
<p>Nothing was left out.</p>
{% endif %}

<h2>Settings</h2>
<div class="scroll"><table><tbody>
{% for name, value in settings %}
<tr><th scope="row">{{ name }}</th><td><code>{{ value }}</code></td></tr>
{% endfor %}
</tbody></table></div>
</body>
</html>
"""

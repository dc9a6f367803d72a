"""The look of the report page: one style sheet, no fonts or pictures from elsewhere."""

CSS = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #59626e; --line: #dde1e7;
  --accent: #1f6fc5; --good: #1a7f4e; --bad: #b3363e; --flat: #8a6414; --mark: #c9efd9; --mark-line: #2f9e77;
  --code: #eef0f4; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #111418; --card: #1a1f25; --ink: #e4e8ee; --soft: #a0a9b5; --line: #303843; --accent: #74b3f2;
    --good: #5fcf9a; --bad: #f0868c; --flat: #e0b85c; --mark: #17492f; --mark-line: #4cc48d; --code: #242b33; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 16px; }
main, header, footer { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .7rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .4rem 0 .8rem; }
a { color: var(--accent); }
.soft, figcaption, .command { color: var(--soft); }
nav { display: flex; flex-wrap: wrap; gap: .35rem .9rem; margin: 1rem 0 0; font-size: .92rem; }
nav a { text-decoration: none; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 1.2rem 1.3rem;
  margin: 1.1rem 0; }
code, pre, .command { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { background: var(--code); border-radius: 4px; padding: .08em .35em; font-size: .88em; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 8px; padding: .8rem 1rem; margin: .5rem 0; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(15rem, 100%), 1fr)); gap: .9rem; }
.card { border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem; min-width: 0; }
.card .figure { font-size: 2rem; font-weight: 650; line-height: 1.15; font-variant-numeric: tabular-nums; }
.card .figure small { font-size: .95rem; font-weight: 400; color: var(--soft); white-space: nowrap; }
.card .name { font-weight: 600; overflow-wrap: anywhere; }
.card p { margin: .2rem 0 0; font-size: .9rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .flat { color: var(--flat); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; max-width: 40rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
figure svg text { font-family: inherit !important; }
figcaption { font-size: .88rem; }
.scroll { overflow-x: auto; margin: .6rem 0 .2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: .38rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th, td:first-child { white-space: normal; min-width: 3.4rem; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; }
tr.plain td { color: var(--soft); }
tr.best td { font-weight: 650; }
td small { color: var(--soft); }
.command { font-size: .78rem; margin: .2rem 0 1rem; overflow-wrap: anywhere; }
.command::before { content: "$ "; }
.notrun { color: var(--soft); font-style: italic; margin: 0; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--accent); }
mark { background: var(--mark); color: inherit; border-bottom: 2px solid var(--mark-line); border-radius: 2px; }
.prompt { opacity: .65; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1rem; margin: .9rem 0 0;
  font-size: .93rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
li { margin: .3rem 0; }
footer { color: var(--soft); font-size: .85rem; padding-bottom: 2.5rem; }
@media (max-width: 40rem) {
  main, header, footer { padding-left: .7rem; padding-right: .7rem; }
  header { padding-top: 1.3rem; } section { padding: .9rem .85rem; border-radius: 10px; }
  table { font-size: .82rem; } th, td { padding: .35rem .4rem; }
  th:first-child, td:first-child { min-width: 6rem; }
  h1 { font-size: 1.5rem; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
}
@media print {
  body { background: none; } section { break-inside: avoid; border: none; padding: 0; } nav { display: none; }
}
"""

"""How the report looks: one style sheet, and one colour for each cause wherever it appears.

Light and dark follow the reader's system. Colours carry a family (green works, blue and violet wait, orange and red
fail, grey idles), and never stand alone: every mark has its name beside it or in a table.
"""

from __future__ import annotations

from myriad.spec.causes import Cause

COLOURS: dict[str, str] = {
    Cause.COMPUTE.value: "#1f9d78",
    Cause.ACTIVATION_RECOMPUTE.value: "#7bbf6a",
    Cause.EXPOSED_COMMUNICATION.value: "#3b6fd8",
    Cause.PIPELINE_BUBBLE.value: "#86a8f0",
    Cause.DATA_WAIT.value: "#2fa7c4",
    Cause.CHECKPOINT_WAIT.value: "#8d63d8",
    Cause.STRAGGLER_WAIT.value: "#5648c8",
    Cause.EVALUATION.value: "#69b7a8",
    Cause.STARTUP.value: "#e2a53c",
    Cause.DETECTION.value: "#e07b39",
    Cause.RECOVERY.value: "#d9534a",
    Cause.LOST_WORK.value: "#b03368",
    Cause.SPARE_IDLE.value: "#a3acb6",
    Cause.NODE_DOWN.value: "#5f6874",
    Cause.OTHER.value: "#c4c9cf",
    Cause.RUNNING_UNATTRIBUTED.value: "#5aa49a",
}
OUTSIDE_COLOUR = "#8c96a1"  # causes outside an allocation, which a job's report never has

STYLE = """
:root{color-scheme:light dark;--page:#f5f6f7;--card:#fff;--ink:#171b20;--soft:#59626d;--line:#dfe3e7;--grid:#eceef1;
--accent:#2f62cf;--fail:#c2372e;--fail-soft:#c2372e22;--good:#147a5b;--track:#eef0f2;--ghost:#9aa6b4}
@media (prefers-color-scheme:dark){:root{--page:#0f1216;--card:#181d23;--ink:#e8ecf1;--soft:#a0abb7;--line:#2c343d;
--grid:#242b33;--accent:#7ba4ff;--fail:#ff8379;--fail-soft:#ff837926;--good:#4fd3a5;--track:#252c34;--ghost:#5f6b78}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1160px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px}
p{margin:0}
.soft{color:var(--soft)}
.small{font-size:13px}
header .top{display:flex;gap:12px;align-items:center;flex-wrap:wrap;margin-top:2px}
.pill{border:1px solid currentColor;border-radius:99px;padding:1px 11px;font-size:13px;font-weight:600}
.pill.good{color:var(--good)}.pill.bad{color:var(--fail)}.pill.plain{color:var(--soft)}
.headline{font-size:20px;line-height:1.4;margin:18px 0 16px;font-weight:600}
.headline b{color:var(--good)}.headline i{color:var(--fail);font-style:normal}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin:0 0 16px}
.fact,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.fact{padding:11px 14px}
.fact dt{color:var(--soft);font-size:13px}
.fact dd{margin:1px 0 0;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.fact .note{display:block;font-size:12.5px;font-weight:400;color:var(--soft);line-height:1.35}
.card{padding:18px 20px;margin:0 0 16px;min-width:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:16px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 0 5px 14px;border-top:1px solid var(--grid);white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:13px;vertical-align:bottom}
th:first-child,td:first-child,.left{text-align:left}
tbody th{font-weight:500;padding-left:0}
td:first-child,thead th:first-child{padding-left:0}
tfoot th,tfoot td{border-top:1px solid var(--line);font-weight:600}
tfoot th{padding-left:0}
thead th{white-space:normal}
.wrap{white-space:normal;min-width:170px}
tbody tr{vertical-align:baseline}
.bars{width:38%;padding-left:18px;vertical-align:middle}
.bars svg{display:block;width:100%;height:18px}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px;vertical-align:-1px}
.stack{display:block;width:100%;height:34px;border-radius:7px;margin:12px 0 8px}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;font-size:13px;color:var(--soft);margin:8px 0 0;padding:0;list-style:none}
.plot{position:relative;margin:26px 0 26px 50px;height:230px}
.plot>svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot .x,.plot .y{position:absolute;font-size:12px;color:var(--soft);font-variant-numeric:tabular-nums;white-space:nowrap}
.plot .x{top:100%;transform:translate(-50%,5px)}
.plot .y{right:100%;transform:translate(-8px,-50%)}
.plot .badge{position:absolute;bottom:100%;transform:translate(-50%,-3px);background:var(--fail);color:var(--card);
border-radius:99px;min-width:18px;height:18px;line-height:18px;text-align:center;font-size:11.5px;font-weight:700}
.series{fill:none;stroke:var(--accent);stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.reference{fill:none;stroke:var(--ink);stroke-width:1.3;stroke-dasharray:2 5;vector-effect:non-scaling-stroke}
.thrown{fill:none;stroke:var(--ghost);stroke-width:1.6;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);vector-effect:non-scaling-stroke}
.axis{stroke:var(--line);vector-effect:non-scaling-stroke}
.mark{stroke:var(--fail);stroke-width:1.4;stroke-dasharray:5 4;vector-effect:non-scaling-stroke}
.band{fill:var(--fail-soft)}
.swatch{display:inline-block;width:18px;height:0;border-top:2px solid var(--accent);margin-right:7px;vertical-align:4px}
.swatch.thrown{border-color:var(--ghost)}.swatch.reference{border-top:2px dotted var(--ink)}
.swatch.mark{border-top:2px dashed var(--fail)}
.swatch.band{height:10px;border:0;background:var(--fail-soft);vertical-align:-1px}
.gantt{display:grid;grid-template-columns:max-content 1fr;gap:6px 12px;margin-top:14px;align-items:center}
.gantt .name{font-size:13.5px;max-width:26vw;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.gantt svg{display:block;width:100%;height:24px;background:var(--track);border-radius:4px}
.gantt .ticks{position:relative;height:18px;font-size:12px;color:var(--soft)}
.gantt .ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.gantt .ticks span:first-child{transform:none}.gantt .ticks span:last-child{transform:translateX(-100%)}
details{margin-top:12px;font-size:14px}
summary{cursor:pointer;color:var(--accent)}
summary:focus-visible{outline:2px solid var(--accent);outline-offset:3px;border-radius:3px}
footer{color:var(--soft);font-size:13px;margin-top:20px}
footer p{margin:4px 0}
@media (max-width:760px){main{padding:18px 12px 32px}.pair{grid-template-columns:1fr;gap:0}.card{padding:14px}
.bars{display:none}.headline{font-size:18px}.facts{grid-template-columns:1fr 1fr;gap:8px}h1{font-size:22px}
.plot{height:190px;margin-left:44px}th,td{padding-left:10px}}
@media print{body{background:#fff}.card,.fact{break-inside:avoid}}
"""

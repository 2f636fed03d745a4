"use strict";
// Curves of one or several runs, with what happened marked on them.
{
  const box = document.getElementById("charts");
  const DASHES = [[], [8, 4], [2, 3], [12, 4, 2, 4], [1, 4], [6, 2, 2, 2], [16, 4], [4, 8]];
  const COLOURS = 8;
  let drawn = [];
  let last = "";
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const text = (tag, content) => { const e = document.createElement(tag); e.textContent = content; return e; };
  const shown = (v) => (v === null || v === undefined ? "" : Math.abs(v) >= 1e5 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(4))));

  function aligned(chart) {
    const tables = chart.series.map((one) => {
      const bad = one.bad.map(([x]) => x);
      const xs = [...new Set([...one.x, ...bad])].sort((a, b) => a - b);
      const at = new Map(one.x.map((x, i) => [x, one.y[i]]));
      return [xs, xs.map((x) => (at.has(x) ? at.get(x) : null))];
    });
    return uPlot.join(tables, tables.map((table) => table.slice(1).map(() => 1)));
  }

  function stacked(data) {
    const sums = data[0].map(() => 0);
    return [data[0], ...data.slice(1).map((values) => values.map((v, i) => (sums[i] += v ?? 0)))];
  }

  function drawMarks(u, chart) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const mark of chart.marks) {
      const x = Math.round(u.valToPos(mark.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = style(mark.kind === "skipped" ? "--bad" : "--warn");
      ctx.setLineDash(mark.kind === "skipped" ? [2, 2] : [6, 4]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.setLineDash([]);
    ctx.fillStyle = style("--bad");
    const size = 5 * devicePixelRatio;
    for (const one of chart.series) for (const [step] of one.bad) {
      const x = u.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x + size, bbox.top + 2 * size); ctx.lineTo(x - size, bbox.top + 2 * size); ctx.fill();
    }
    ctx.restore();
  }

  function rangeOf(chart, low, high) {
    if (chart.stacked) return [0, (high || 1) * 1.04];
    if (low === null || high === null) return [0, 1];
    if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  async function open(chart, step, run) {
    const slug = chart.runs[run].slug;
    let rollout = step;
    if (chart.axis === "train") rollout = (await (await fetch(`/api/run/${encodeURIComponent(slug)}/step?step=${step}`)).json()).rollout;
    location.href = `/run/${encodeURIComponent(slug)}/rollout/rollout-${rollout}`;
  }

  function seriesOf(chart, one, i) {
    const labels = [...new Set(chart.series.map((s) => s.label))];
    const colour = style(`--c${(chart.stacked ? i : labels.indexOf(one.label)) % COLOURS}`);
    const bad = new Map(one.bad.map(([x, what]) => [x, what]));
    return {
      label: chart.runs.length > 1 ? `${one.label}, ${chart.runs[one.run].name}` : one.label,
      stroke: colour, width: 1.5, dash: DASHES[one.run % DASHES.length], points: { show: !chart.stacked && chart.raw[0].length < 30, size: 4 },
      fill: chart.stacked ? colour + "66" : undefined, spanGaps: chart.runs.length > 1,
      value: (u, v, s, idx) => (idx === null || idx === undefined ? "" : bad.get(u.data[0][idx]) ?? shown(chart.stacked ? chart.raw[i + 1][idx] : v)),
    };
  }

  function draw(chart) {
    const figure = document.createElement("figure");
    figure.className = "chart";
    const caption = text("figcaption", chart.title + " ");
    const unit = text("span", chart.unit ? chart.unit : "");
    unit.className = "unit";
    caption.append(unit);
    figure.append(caption);
    box.append(figure);
    chart.raw = aligned(chart);
    const data = chart.stacked ? stacked(chart.raw) : chart.raw;
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 }, font: "11px system-ui" };
    const positive = chart.raw.slice(1).some((values) => values.some((v) => v > 0));
    const plot = new uPlot({
      width: Math.max(240, figure.clientWidth), height: 190,
      cursor: { sync: { key: chart.axis }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: chart.log && positive ? { distr: 3 } : { range: (u, low, high) => rangeOf(chart, low, high) } },
      axes: [{ ...axis, label: chart.axis === "train" ? "optimizer step" : "rollout", labelSize: 14, labelFont: "11px system-ui", size: 34 }, { ...axis, size: 56, values: (u, vs) => vs.map((v) => (v === null ? "" : shown(v))) }],
      series: [{ label: chart.axis === "train" ? "step" : "rollout" }, ...chart.series.map((one, i) => seriesOf(chart, one, i))],
      bands: chart.stacked ? chart.series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : [],
      hooks: { draw: [(u) => drawMarks(u, chart)] },
    }, data, figure);
    let down = 0;
    plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      const i = plot.cursor.idx;
      if (Math.abs(event.clientX - down) < 3 && i !== null && i !== undefined) open(chart, plot.data[0][i], chart.series[0].run);
    });
    const ends = chart.series.map((one) => `${one.label} ends at ${one.bad.length && one.bad.at(-1)[0] >= (one.x.at(-1) ?? -1) ? one.bad.at(-1)[1] : shown(one.y.at(-1))}`);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", `${chart.title}: ${ends.join(", ")}`);
    figure.append(...details(chart));
    drawn.push({ plot, figure });
  }

  function details(chart) {
    const found = [];
    const bad = chart.series.flatMap((one) => one.bad.map(([step, what]) => ({ step, run: one.run, kind: "not finite", text: `${one.label} is ${what}` })));
    const marks = [...bad, ...chart.marks];
    if (marks.length) {
      const marked = document.createElement("details");
      marked.append(text("summary", `${marks.length} marks`));
      const list = document.createElement("ul");
      for (const mark of marks.slice(0, 200)) {
        const item = document.createElement("li");
        const link = text("a", `${chart.axis === "train" ? "step" : "rollout"} ${mark.step}`);
        link.href = "#";
        link.addEventListener("click", (event) => { event.preventDefault(); open(chart, mark.step, mark.run); });
        item.append(link, ` ${visible(mark.kind)}: ${visible(mark.text)}`);
        list.append(item);
      }
      marked.append(list);
      found.push(marked);
    }
    const values = document.createElement("details");
    values.append(text("summary", "values"));
    values.addEventListener("toggle", () => { if (values.open && !values.querySelector("table")) values.append(table(chart)); });
    found.push(values);
    return found;
  }

  function table(chart) {
    const grid = document.createElement("table");
    grid.className = "grid";
    const head = grid.createTHead().insertRow();
    head.append(text("th", chart.axis === "train" ? "step" : "rollout"), ...chart.series.map((one) => text("th", chart.runs.length > 1 ? `${one.label}, ${chart.runs[one.run].name}` : one.label)));
    const bad = chart.series.map((one) => new Map(one.bad.map(([x, what]) => [x, what])));
    const body = grid.createTBody();
    chart.raw[0].slice(-500).forEach((step, k) => {
      const i = Math.max(0, chart.raw[0].length - 500) + k;
      const row = body.insertRow();
      const link = text("a", String(step));
      link.href = `/run/${encodeURIComponent(chart.runs[0].slug)}/rollout/rollout-${step}`;
      row.insertCell().append(chart.axis === "train" ? String(step) : link);
      chart.series.forEach((_, s) => { const cell = row.insertCell(); cell.className = "r num"; cell.textContent = bad[s].get(step) ?? shown(chart.raw[s + 1][i]); });
    });
    return grid;
  }

  async function load() {
    const answer = await fetch(box.dataset.source);
    const content = await answer.json();
    if (content.error) { box.replaceChildren(text("p", content.error)); return; }
    const stamp = JSON.stringify(content.versions) + isDark();
    if (stamp === last) return;
    const open = drawn.length && box.querySelector("details[open]");
    if (open && last.endsWith(String(isDark()))) return;
    last = stamp;
    drawn.forEach(({ plot }) => plot.destroy());
    drawn = [];
    box.replaceChildren();
    content.charts.forEach((chart) => draw({ ...chart, runs: content.runs }));
    if (!content.charts.length) box.append(text("p", "No metric has been logged yet."));
    box.dataset.ready = "1";
  }

  addEventListener("resize", () => drawn.forEach(({ plot, figure }) => plot.setSize({ width: Math.max(240, figure.clientWidth), height: 190 })));
  document.addEventListener("slime:theme", load);
  document.addEventListener("slime:change", load);
  load();
}

"use strict";
// Lanes of a trace on a canvas: zoomed with the wheel or + and -, moved with the mouse or the arrows.
{
  const box = document.getElementById("timeline");
  const canvas = box?.querySelector("canvas");
  const said = document.getElementById("span");
  const LANE = 18, HEAD = 20, LEFT = 190, COLOURS = 8;
  let data = null, from = 0, to = 1, drag = null;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (name) => { let h = 0; for (const c of name.replace(/\d+/g, "N")) h = (h * 31 + c.codePointAt(0)) % 997; return style(`--c${h % COLOURS}`); };
  const duration = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(3)} s` : ms >= 1 ? `${ms.toFixed(2)} ms` : `${(ms * 1000).toFixed(0)} \u00b5s`);

  function depths() {
    let y = HEAD;
    for (const lane of data.lanes) {
      const open = [];
      lane.rows = 1;
      lane.placed = lane.spans.map(([name, start, length]) => {
        while (open.length && open.at(-1) <= start + 0.0015) open.pop();
        const depth = Math.min(open.length, 7);
        open.push(start + length);
        lane.rows = Math.max(lane.rows, depth + 1);
        return { name, start, length, depth };
      });
      lane.y = y;
      y += lane.rows * LANE + 5;
    }
    return y;
  }

  const scale = () => (canvas.clientWidth - LEFT) / (to - from);
  const place = (t) => LEFT + (t - from) * scale();

  function draw() {
    const ratio = devicePixelRatio, width = box.clientWidth, height = data.height;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui";
    ctx.textBaseline = "middle";
    drawAxis(ctx, width, height);
    let process = "";
    for (const lane of data.lanes) {
      ctx.save();
      ctx.beginPath(); ctx.rect(LEFT, 0, width, height); ctx.clip();
      for (const span of lane.placed) {
        const x = place(span.start), w = Math.max(0.6, span.length * scale());
        if (x + w < LEFT || x > width) continue;
        const y = lane.y + span.depth * LANE;
        ctx.fillStyle = colourOf(span.name);
        ctx.globalAlpha = 0.32; ctx.fillRect(x, y, w, LANE - 2); ctx.globalAlpha = 1;
        ctx.fillRect(x, y, Math.min(w, 2), LANE - 2);
        if (w > 30) {
          ctx.fillStyle = style("--ink");
          ctx.save(); ctx.beginPath(); ctx.rect(Math.max(x, LEFT), y, w - 2, LANE); ctx.clip();
          ctx.fillText(visible(span.name), Math.max(x, LEFT) + 4, y + LANE / 2 - 1);
          ctx.restore();
        }
      }
      ctx.restore();
      ctx.fillStyle = style(process === lane.process ? "--soft" : "--ink");
      ctx.fillText(visible(process === lane.process ? `   ${lane.title}` : lane.process).slice(0, 30), 2, lane.y + LANE / 2 - 1);
      process = lane.process;
    }
  }

  function drawAxis(ctx, width, height) {
    const rough = (to - from) / 8, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    ctx.strokeStyle = style("--line"); ctx.fillStyle = style("--soft");
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = Math.round(place(t)) + 0.5;
      if (x < LEFT) continue;
      ctx.beginPath(); ctx.moveTo(x, 0); ctx.lineTo(x, height); ctx.stroke();
      ctx.fillText(duration(t), x + 3, 8);
    }
  }

  function zoom(factor, at) {
    const least = data.end / 1e6 || 1e-6;
    const width = Math.min(data.end * 1.02, Math.max(least, (to - from) * factor));
    const share = (at - from) / (to - from);
    move(at - share * width, width);
  }
  function move(start, width = to - from) {
    from = Math.min(Math.max(0, start), Math.max(0, data.end * 1.02 - width));
    to = from + width;
    draw();
  }

  function spanAt(event) {
    const r = canvas.getBoundingClientRect(), x = event.clientX - r.left, y = event.clientY - r.top;
    for (const lane of data.lanes) {
      if (y < lane.y || y > lane.y + lane.rows * LANE) continue;
      const depth = Math.floor((y - lane.y) / LANE), t = from + (x - LEFT) / scale(), slack = 1 / scale();
      const found = lane.placed.find((s) => s.depth === depth && t >= s.start - slack && t <= s.start + s.length + slack);
      if (found) return { lane, found };
    }
    return null;
  }

  async function load() {
    data = await (await fetch(box.dataset.source)).json();
    if (data.error || !data.lanes.length) { said.textContent = data.error || "No spans."; return; }
    data.height = depths();
    to = data.end * 1.02 || 1;
    draw();
    if (data.left_out) said.textContent = `${data.left_out} shorter spans are not drawn.`;
    canvas.addEventListener("wheel", (e) => { if (e.ctrlKey || Math.abs(e.deltaY) < Math.abs(e.deltaX)) return; e.preventDefault(); zoom(e.deltaY > 0 ? 1.25 : 0.8, from + (e.offsetX - LEFT) / scale()); }, { passive: false });
    canvas.addEventListener("mousedown", (e) => { drag = { x: e.clientX, from }; });
    addEventListener("mouseup", () => { drag = null; });
    canvas.addEventListener("mousemove", (e) => {
      if (drag) { move(drag.from - (e.clientX - drag.x) / scale()); return; }
      const hit = spanAt(e);
      said.textContent = hit ? `${visible(hit.lane.process)}: ${visible(hit.found.name)}, ${duration(hit.found.length)}, from ${duration(hit.found.start)} on` : "\u00a0";
    });
    canvas.addEventListener("keydown", (e) => {
      const by = (to - from) / 8, middle = (from + to) / 2;
      const act = { "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1.4, middle), ArrowLeft: () => move(from - by), ArrowRight: () => move(from + by), 0: () => move(0, data.end * 1.02) }[e.key];
      if (act) { act(); e.preventDefault(); }
    });
    addEventListener("resize", draw);
    document.addEventListener("slime:theme", draw);
    box.dataset.ready = "1";
  }
  if (canvas) load();
}

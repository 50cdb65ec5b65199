// Draws the charts of a page with uPlot: every .chart holds its data as JSON (charts.py says what is in it).
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const WIDTHS = { thin: 0.6, line: 1.8, marked: 1.8, steps: 1.6, dotted: 1.6, dots: 0 };
  const HEIGHT = 230; // pixels of the plot
  const LEVEL = [6, 4]; // pixels of a dash and a gap

  const shown = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (value === 0 || (size >= 1000 && Number.isInteger(value))) return value.toLocaleString("en");
    return size >= 1e-4 && size < 1e6 ? String(+value.toPrecision(4)) : value.toExponential(2);
  };

  // the value under the pointer, else the one before it: lines with fewer points have gaps; without a pointer the last
  const valueAt = (values, index) => {
    for (let i = index ?? values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
    return null;
  };

  const legend = (u, value, series, index) => shown(valueAt(u.data[series], index));

  const single = (line) => line.y.filter((value) => value !== null).length === 1; // no line goes through it

  function options(data, axis, box) {
    const stroke = () => css("muted");
    const font = (weight) => `${weight} 12px ${css("sans")}`;
    const grid = { stroke: () => css("grid"), width: 1 };
    const dots = data.lines.every((line) => line.style === "dots");
    const series = data.lines.map((line) => ({
      label: line.name,
      stroke: () => css(line.color),
      alpha: line.style === "thin" ? 0.45 : 1,
      width: WIDTHS[line.style],
      dash: line.style === "dotted" ? [2, 3] : undefined,
      paths: line.style === "steps" || line.style === "dotted" ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: ["marked", "dots"].includes(line.style) || single(line), size: line.style === "dots" ? 10 : 5, fill: () => css(line.color) },
      spanGaps: true,
      value: legend,
    }));
    for (const name of Object.keys(data.levels)) {
      series.push({
        label: name, stroke: () => css("muted"), width: 1, dash: LEVEL, points: { show: false }, paths: () => null, value: legend,
      });
    }
    const sizeOf = (u, values) => 12 + 7 * Math.max(1, ...(values ?? []).map((text) => (text ?? "").length));
    return {
      width: box.clientWidth,
      height: HEIGHT,
      series: [{ label: data.axes[axis], value: legend }, ...series],
      scales: {
        x: { time: false, distr: data.log.includes("x") ? 3 : 1, range: dots ? padded : whole },
        y: { distr: data.log.includes("y") ? 3 : 1, ...(data.zero ? { range: (u, low, high) => [0, high * 1.08 || 1] } : {}) },
      },
      axes: [
        { stroke, font: font("normal"), grid: { show: false }, ticks: grid, size: 34, ...(data.log.includes("x") ? { filter: round } : {}), values: (u, at) => at.map(tick) },
        { stroke, font: font("normal"), grid, ticks: { show: false }, size: sizeOf, values: (u, at) => at.map(tick) },
      ],
      cursor: { sync: dots ? undefined : { key: axis, scales: ["x", null] }, points: { size: 7 } },
      legend: { markers: { fill: (u, s) => u.series[s].stroke(u, s), width: 0 } },
      hooks: { draw: [(u) => marks(u, data, axis), ...(dots ? [(u) => names(u)] : [])] },
    };
  }

  const tick = (value) => (value === null ? "" : Math.abs(value) >= 1e5 ? value.toExponential(0) : value.toLocaleString("en", { maximumSignificantDigits: 6 }));
  // of a logarithmic axis, the ticks that get a number
  const round = (u, splits) => splits.map((value) => (/^[1235]\.0+e/.test(value.toExponential(6)) ? value : null));
  const padded = (u, low, high) => (u.scales.x.distr === 3 ? [low / 1.5, high * 1.5] : [low - (high - low || 1) * 0.15, high + (high - low || 1) * 0.15]);

  // one point alone stands at the end of an axis from 0; uPlot would go on to twice its place
  const whole = (u, low, high) => (u.data[0].length === 1 && u.scales.x.distr === 1 ? [0, u.data[0][0] || 1] : [low, high]);

  function marks(u, data, axis) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = css("muted");
    ctx.font = `${11 * devicePixelRatio}px ${css("sans")}`;
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([devicePixelRatio, 3 * devicePixelRatio]);
    let named = 0;
    for (const mark of data.marks) {
      const x = u.valToPos(mark.x[axis], "x", true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
      ctx.fillText(mark.name, x + (ctx.textAlign === "right" ? -4 : 4) * devicePixelRatio, bbox.top + (11 + 13 * named) * devicePixelRatio);
      named += mark.name !== "";
    }
    // from edge to edge, however few values the lines have: a path of uPlot's needs two
    ctx.textAlign = "right";
    ctx.setLineDash(LEVEL.map((length) => length * devicePixelRatio));
    const levels = Object.entries(data.levels); // their series are the last ones
    for (const [k, [name, level]] of levels.entries()) {
      const y = u.valToPos(level, "y", true);
      if (!u.series.at(k - levels.length).show || !(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.fillText(name, bbox.left + bbox.width - 4 * devicePixelRatio, y - 4 * devicePixelRatio);
    }
    ctx.restore();
  }

  // beside single points: what they are, so that nobody has to compare colors
  function names(u) {
    const { ctx } = u;
    ctx.save();
    ctx.fillStyle = css("ink");
    ctx.font = `${12 * devicePixelRatio}px ${css("sans")}`;
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    for (let s = 1; s < u.series.length; s++) {
      const index = u.data[s].findIndex((value) => value !== null && value !== undefined);
      if (index < 0 || !u.series[s].show || u.series[s].dash) continue;
      const x = u.valToPos(u.data[0][index], "x", true);
      ctx.fillText(u.series[s].label, x, u.valToPos(u.data[s][index], "y", true) - 10 * devicePixelRatio);
    }
    ctx.restore();
  }

  const drawn = [];

  function draw(box, data, axis) {
    axis = axis in data.axes ? axis : Object.keys(data.axes)[0];
    const joined = uPlot.join(data.lines.map((line) => sorted(line.x[axis], line.y)));
    const levels = Object.values(data.levels).map((level) => joined[0].map(() => level));
    drawn.push([new uPlot(options(data, axis, box), [...joined, ...levels], box), box]);
  }

  // uPlot needs ascending x, without values that are missing
  function sorted(xs, ys) {
    const kept = xs.map((x, i) => [x, ys[i]]).filter(([x]) => x !== null).sort((a, b) => a[0] - b[0]);
    const unique = kept.filter(([x], i) => i + 1 === kept.length || kept[i + 1][0] !== x);
    return [unique.map(([x]) => x), unique.map(([, y]) => y)];
  }

  const charts = [...document.querySelectorAll(".chart")].map((box) => [box, JSON.parse(box.querySelector("script").textContent)]);

  function drawAll() {
    for (const [plot] of drawn.splice(0)) plot.destroy();
    const axis = document.querySelector("input[name=axis]:checked")?.value;
    for (const [box, data] of charts) draw(box, data, axis);
  }

  const fit = () => drawn.forEach(([plot, box]) => plot.width !== box.clientWidth && plot.setSize({ width: box.clientWidth, height: HEIGHT }));
  document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", drawAll));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", fit);
  drawAll();
})();

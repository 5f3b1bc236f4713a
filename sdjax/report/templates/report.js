"use strict";
// Shared by the figures and the transcript viewer: unpacking of embedded data, theme, errors made visible.
const report = {
  palette: JSON.parse(document.getElementById("palette").textContent),
  async unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  },
  dark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },
  colour(light) { return this.dark() ? this.palette[light] || light : light; },
  variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); },
  fail(error) {
    document.documentElement.dataset.errors = String(error && error.stack || error);
    const box = document.createElement("p");
    box.className = "warnings";
    box.textContent = "This page could not show everything: " + error;
    document.querySelector("main").prepend(box);
    console.error(error);
  },
};
window.addEventListener("error", (event) => report.fail(event.error || event.message));

(function theme() {
  const wanted = new URLSearchParams(location.search).get("theme");
  if (wanted === "dark" || wanted === "light") document.documentElement.dataset.theme = wanted;
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = report.dark() ? "light" : "dark";
    document.dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
  const swatches = () => document.querySelectorAll("[data-colour]").forEach((element) => {
    element.style.setProperty("--chip", report.colour(element.dataset.colour));
    if (element.tagName === "line") element.setAttribute("stroke", report.colour(element.dataset.colour));
  });
  document.addEventListener("themechange", swatches);
  swatches();
})();

(function sorting() {
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.sort !== undefined ? cell.dataset.sort : cell.textContent.trim();
  };
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  document.querySelectorAll("table.sortable thead th").forEach((head) => head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const numeric = head.classList.contains("number");
    const next = head.ariaSort === "descending" ? "ascending" : head.ariaSort === "ascending" ? "descending" : numeric ? "descending" : "ascending";
    for (const other of head.parentNode.cells) other.ariaSort = "none";
    head.ariaSort = next;
    const missing = (row) => ["", "–"].includes(key(row, column));
    const rows = [...body.rows].sort((a, b) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b); // rows without a value stay last
      return (next === "ascending" ? 1 : -1) * compare(key(a, column), key(b, column));
    });
    body.append(...rows);
  }));
})();

(async function plots() {
  const hidden = new Set(), drawn = new Set();
  const [source, data] = await Promise.all([report.unpack("plotly-source"), report.unpack("figure-data")]);
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  const figures = JSON.parse(data);
  const axisName = () => document.querySelector("input[name=axis]:checked").value;

  // Light-theme colours of the specification become those of the current theme.
  const themed = (value) => {
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    return typeof value === "string" && value[0] === "#" ? report.colour(value) : value;
  };
  const build = (id) => {
    const figure = figures[id], spec = themed(figure.spec), axis = (figure.axes || {})[axisName()];
    const axisStyle = { gridcolor: report.variable("--grid"), linecolor: report.variable("--line"), tickcolor: report.variable("--line"), zerolinecolor: report.variable("--line") };
    Object.assign(spec.layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: report.variable("--soft") },
      hoverlabel: { bgcolor: report.variable("--card"), bordercolor: report.variable("--line"), font: { color: report.variable("--ink"), size: 12 } },
      xaxis: { ...spec.layout.xaxis, ...axisStyle }, yaxis: { ...spec.layout.yaxis, ...axisStyle },
    });
    spec.data.forEach((trace, number) => {
      if (trace.meta !== undefined && hidden.has(trace.meta)) trace.visible = false;
      if (trace.error_y) trace.error_y.visible = document.getElementById("errors").checked;
      if (axis && axis.x[number]) trace.x = axis.x[number];
      else if (axis) trace.visible = false;
      if (trace.marker && trace.marker.pattern) trace.marker.pattern.fgcolor = report.variable("--soft");
    });
    if (axis) {
      spec.layout.xaxis.title.text = axis.title;
      spec.layout.shapes = themed(axis.shapes);
    }
    return spec;
  };
  const draw = (id) => {
    const spec = build(id);
    drawn.add(id);
    return Plotly.react(id, spec.data, spec.layout, { responsive: true, displayModeBar: false });
  };
  const redraw = () => Promise.all([...drawn].map(draw));
  const observer = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach((entry) => {
    observer.unobserve(entry.target);
    draw(entry.target.id).catch(report.fail);
  }), { rootMargin: "400px" });
  Object.keys(figures).forEach((id) => observer.observe(document.getElementById(id)));

  document.querySelectorAll("button.chip").forEach((chip) => chip.addEventListener("click", () => {
    const run = chip.dataset.run, hide = !hidden.has(run);
    hidden[hide ? "add" : "delete"](run);
    chip.setAttribute("aria-pressed", String(!hide));
    redraw();
  }));
  document.querySelectorAll("input[name=axis], #errors").forEach((input) => input.addEventListener("change", redraw));
  document.addEventListener("themechange", redraw);
  document.documentElement.dataset.plots = "ready";
})().catch(report.fail);

"use strict";
// Figures: drawn by plotly when they come into view, redrawn for theme, axis and hidden runs.
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

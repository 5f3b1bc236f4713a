"use strict";
// Shared by figures and transcript viewer: unpacking of embedded data, theme, errors made visible; sorting and CSV.
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

(function csv() {
  let tables;
  document.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-csv]");
    if (!link) return;
    event.preventDefault();
    try {
      tables = tables || JSON.parse(await report.unpack("csv-data"));
      const file = document.createElement("a");
      file.href = URL.createObjectURL(new Blob([tables[link.dataset.csv]], { type: "text/csv" }));
      file.download = link.dataset.csv + ".csv";
      file.click();
      setTimeout(() => URL.revokeObjectURL(file.href), 60000);
      document.documentElement.dataset.csv = link.dataset.csv;
    } catch (error) { report.fail(error); }
  });
})();

"""The report in headless Chromium: it draws, its controls work, hostile text does nothing, the console stays silent."""

import re
import shutil
import subprocess

import pytest

from sdjax.report import build_report
from tests.report.synthetic import write_run
from tests.report.synthetic_study import write_study

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=20000"
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
# Uses every control once and writes what it saw into the document.
EXERCISE = """
<script>(async function exercise() {
  const root = document.documentElement, wait = (ms) => new Promise((done) => setTimeout(done, ms));
  while (!(root.dataset.plots && root.dataset.viewer && document.querySelector("#curves-0 .main-svg"))) await wait(50);
  const colours = () => [...document.querySelectorAll(".tokens span")].map((span) => span.style.backgroundColor).join();
  const axis = () => document.querySelector("#curves-0 .xtitle").textContent;
  const seen = {axis: axis(), runs: document.querySelectorAll("#curves-0 .scatterlayer .trace").length};
  document.querySelector("input[value=net]").click();
  await wait(300);
  seen.net = axis();
  document.querySelector("#errors").click();
  await wait(300);
  seen.bars = document.querySelectorAll("#curves-0 .errorbar").length;
  document.querySelector(".chip[data-run=GRPO]").click();
  await wait(300);
  seen.visible = document.querySelectorAll("#curves-0 .scatterlayer .trace").length;
  const rows = () => [...document.querySelector("#final tbody").rows].map((row) => row.cells[0].textContent).join();
  const mean = document.querySelectorAll("#final thead th button")[1];
  mean.click();
  seen.descending = rows();
  mean.click();
  seen.ascending = rows();
  const select = document.getElementById("v-colour"), before = colours();
  seen.streams = select.options.length;
  select.value = "1";
  select.dispatchEvent(new Event("change"));
  seen.recoloured = before !== colours();
  document.querySelector(".tokens span").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  const tip = document.getElementById("v-tip");
  seen.tip = !tip.hidden && /lO student +−?\\d+\\.\\d+\\nlT teacher/.test(tip.textContent);
  const episode = document.getElementById("v-episode").value;
  document.getElementById("v-next").click();
  seen.moved = episode !== document.getElementById("v-episode").value;
  document.querySelector("a[data-csv=final]").click();
  await wait(300);
  seen.csv = root.dataset.csv;
  document.getElementById("theme").click();
  await wait(300);
  seen.theme = root.dataset.theme;
  root.dataset.seen = Object.entries(seen).map((pair) => pair.join("=")).join(";");
})();</script>
"""

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]


def open_in_chromium(report, profile, query):
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1280,6000", "--dump-dom"]
    command.append(f"{report.as_uri()}?{query}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
def test_report_opens_and_works(tmp_path):
    low = [0.1, 0.1, 0.1, 0.1, 0.1]
    sdar = write_run(tmp_path, "sdar", teacher_s=0.5, hostile=HOSTILE, curve=low)
    report = build_report([write_run(tmp_path, "grpo"), sdar], tmp_path / "report.html")
    report.write_text(report.read_text(encoding="utf-8") + EXERCISE, encoding="utf-8")
    dom, console = open_in_chromium(report, tmp_path / "profile", "theme=light")
    assert console == []
    head = dom[: dom.index("<head")]
    assert "data-errors" not in head
    seen = dict(pair.split("=") for pair in re.search(r'data-seen="([^"]*)"', head)[1].split(";"))  # pyright: ignore
    assert (seen["axis"], seen["net"]) == ("completed updates", "net device-seconds")
    assert (seen["runs"], seen["visible"]) == ("2", "1")
    assert int(seen["bars"]) == 10
    assert (seen["descending"], seen["ascending"]) == ("GRPO,SDAR", "SDAR,GRPO")
    assert seen["tip"] == "true"
    assert (seen["streams"], seen["recoloured"], seen["moved"], seen["theme"]) == ("4", "true", "true", "dark")
    assert seen["csv"] == "final"
    assert dom.count('class="main-svg"') >= 2 * 5  # curves, ledger and health, two layers each
    assert "<title>GRPO and SDAR" in dom
    body = re.sub(r"<script.*?</script>", "", dom, flags=re.S)
    assert "<img" not in body and "<b>bold" not in body


def test_the_page_reports_its_own_errors(tmp_path):
    report = build_report([write_run(tmp_path, "grpo", steps=5)], tmp_path / "report.html")
    text = re.sub(r'(id="figure-data">)[^<]*', r"\1AAAA", report.read_text(encoding="utf-8"))
    report.write_text(text, encoding="utf-8")
    dom, console = open_in_chromium(report, tmp_path / "profile", "theme=dark")
    assert console and "data-errors" in dom[: dom.index("<head")]
    assert "This page could not show everything" in dom


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_study_opens_without_errors(tmp_path, theme):
    """Several methods and settings: every part draws, in both themes, and a long table sorts."""
    panels = {"alfworld": 40, "searchqa": 40}
    runs = write_study(tmp_path, methods=("grpo", "agent_opsd", "icsd"), sizes=("2B", "4B"), panels=panels, seeds=2)
    report = build_report(runs, tmp_path / "report.html")
    report.write_text(report.read_text(encoding="utf-8") + EXERCISE_STUDY, encoding="utf-8")
    dom, console = open_in_chromium(report, tmp_path / "profile", f"theme={theme}")
    assert console == []
    head = dom[: dom.index("<head")]
    assert "data-errors" not in head
    seen = dict(pair.split("=") for pair in re.search(r'data-seen="([^"]*)"', head)[1].split(";"))  # pyright: ignore
    assert int(seen["shades"]) >= 1  # the collapse
    assert (seen["ranks"], seen["histogram"], seen["costs"]) == ("3", "true", "2")
    assert seen["sorted"] == "true" and seen["overflow"] == "false"


EXERCISE_STUDY = """
<script>(async function exercise() {
  const root = document.documentElement, wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const drawn = (id) => document.querySelector(`#${id} .main-svg`);
  for (const details of document.querySelectorAll("#health details")) details.open = true;
  while (!(root.dataset.plots && drawn("curves-3") && drawn("cost-1") && drawn("drop-histogram"))) await wait(50);
  const seen = {shades: document.querySelectorAll("#curves-1 .shapelayer path").length};
  seen.ranks = document.querySelectorAll("#rank-changes .scatterlayer .trace").length;
  seen.histogram = document.querySelectorAll("#drop-histogram .bars path").length > 0;
  seen.costs = document.querySelectorAll("#cost .scatterlayer").length;
  const body = document.querySelector("#budget tbody");
  document.querySelectorAll("#budget thead th button")[5].click();
  const scores = [...body.rows].map((row) => Number(row.cells[5].dataset.sort));
  seen.sorted = scores.every((score, k) => k === 0 || scores[k - 1] >= score);
  seen.overflow = root.scrollWidth > innerWidth;
  root.dataset.seen = Object.entries(seen).map((pair) => pair.join("=")).join(";");
})();</script>
"""

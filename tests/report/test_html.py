"""The page: self-contained, escaped, complete for partial studies; figures valid for plotly; transcripts bounded."""

import base64
import csv
import dataclasses
import gzip
import html.parser
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest

from sdjax import jsonl
from sdjax.report import build_report, figures, load, load_run, transcripts
from sdjax.report.html import script_json
from sdjax.report.static import save_curves_png
from tests.report.synthetic import write_run

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*7 }}\u2028\"'&"


class Page(html.parser.HTMLParser):
    """Collects elements, links and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.scripts, self.open = [], [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self.links += [value for key, value in attrs if key in ("href", "src", "action")]
        self.open = attributes.get("id", "?") if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open:
            self.scripts[self.open] = data
        else:
            self.text.append(data)

    def unpacked(self, name):
        return gzip.decompress(base64.b64decode(self.scripts[name])).decode()


def page(tmp_path, *runs):
    out = build_report(runs, tmp_path / "out" / "report.html")
    return Page(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    return [write_run(root, "grpo"), write_run(root, "sdar", teacher_s=0.5)]


def test_two_runs(two_runs, tmp_path):
    out = build_report(two_runs, tmp_path / "report.html")
    assert out == tmp_path / "report.html"
    assert out.stat().st_size < 6_000_000
    read = Page(out.read_text(encoding="utf-8"))
    text = " ".join(" ".join(read.text).split())
    assert "GRPO and SDAR on ALFWorld / tiny-0.2M" in text
    assert "evaluation variance of one training run" in text
    assert "SDAR minus GRPO is" in text
    assert "warning" not in text
    assert list(tmp_path.iterdir()) == [out]  # no temporary file is left
    again = build_report(two_runs, tmp_path / "again.html")
    assert again.read_bytes() == out.read_bytes()


def test_the_file_needs_no_network(two_runs, tmp_path):
    read = page(tmp_path, *two_runs)
    assert [link for link in read.links if not link.startswith(("#", "data:", ".."))] == []
    (policy,) = [
        a["content"] for tag, a in read.tags if tag == "meta" and "content" in a and "default-src" in a["content"]
    ]
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy
    assert sum("plotly" in name for name in read.scripts) == 1
    assert "plotly.js" in read.unpacked("plotly-source")[:200]


def test_every_figure_and_table_has_its_csv(two_runs, tmp_path):
    read = page(tmp_path, *two_runs)
    tables = json.loads(read.unpacked("csv-data"))
    linked = {attributes["data-csv"] for tag, attributes in read.tags if tag == "a" and "data-csv" in attributes}
    figure_ids = set(json.loads(read.unpacked("figure-data")))
    assert figure_ids <= linked <= set(tables)
    assert {"final", "steadiness", "budget", "wins", "methods", "ledger", "provenance", "published"} <= linked
    canvases = {attributes["id"]: attributes for tag, attributes in read.tags if attributes.get("role") == "img"}
    assert set(canvases) == figure_ids and all(len(one["aria-label"]) > 40 for one in canvases.values())
    assert tables["curves-0"].splitlines()[0].startswith("setting,run,step,score_percent")
    assert len(list(csv.reader(io.StringIO(tables["final"])))) == 1 + len(two_runs)


def test_numbers_lead_to_their_run_and_runs_to_their_directory(two_runs, tmp_path):
    read = page(tmp_path, *two_runs)
    targets = {link[1:] for link in read.links if link.startswith("#run-")}
    anchors = {attributes.get("id") for _, attributes in read.tags}
    assert targets == {"run-1", "run-2"} and targets <= anchors
    for path in two_runs:
        assert any(link.endswith(path.name) and (tmp_path / "out" / link).exists() for link in read.links)


def test_equal_warnings_of_several_runs_are_one(two_runs, tmp_path):
    for name in ("grpo", "sdar"):
        jsonl.append(write_run(tmp_path, name) / "metrics.jsonl", [{"no": "step"}])
    text = " ".join(" ".join(page(tmp_path, *sorted(tmp_path.glob("alfworld-*"))).text).split())
    assert "1 warning " in text and "all 2 runs metrics.jsonl: 1 lines without an integer step" in text


def test_hostile_text_stays_text(two_runs, tmp_path):
    run = write_run(tmp_path, "sdar", teacher_s=0.5, hostile=HOSTILE)
    config = json.loads((run / "config.json").read_text())
    config["method"]["name"] = config["model"]["path"] = HOSTILE
    (run / "config.json").write_text(json.dumps(config))
    read, clean = page(tmp_path, run), page(tmp_path, two_runs[1])
    assert not [tag for tag, attributes in read.tags if tag == "img" or any(key.startswith("on") for key in attributes)]
    assert [tag for tag, _ in read.tags].count("script") == [tag for tag, _ in clean.tags].count("script")
    assert "onerror=alert(1)" in "".join(read.text)  # shown, as text
    assert "{{ 7*7 }}" in "".join(read.text)
    (record,) = json.loads(read.unpacked("transcript-data"))
    assert record["steps"][0]["episodes"][0]["turns"][0]["tokens"][-1] == HOSTILE
    names = {
        trace["name"] for one in json.loads(read.unpacked("figure-data")).values() for trace in one["spec"]["data"]
    }
    assert not any("<" in name for name in names)  # plotly reads markup in labels


def test_script_json_cannot_leave_its_element():
    value = {"</script>": ["<!--", "&", math.nan, math.inf, {"x": (1, None)}]}
    text = str(script_json(value))
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"</script>": ["<!--", "&", None, None, {"x": [1, None]}]}


def test_partial_study_renders(tmp_path):
    config_only = tmp_path / "config-only"
    config_only.mkdir()
    settings = {"method": {"name": "grpo"}, "env": {"name": "webshop"}, "model": {"path": "m"}}
    (config_only / "config.json").write_text(json.dumps(settings))
    torn = write_run(tmp_path, "sdar", done=False)
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step":')
    (torn / "rollouts" / "step_000020.json").write_text('{"step": 20, "episodes": [{"turns": ')
    read = page(tmp_path, config_only, torn)
    text = " ".join(" ".join(read.text).split())
    assert "WebShop / m: not run." in text
    assert "the last line is torn" in text
    assert "step_000020.json is not a readable transcript file" in text
    assert "no GRPO run in this setting" in text
    assert [step["step"] for step in json.loads(read.unpacked("transcript-data"))[0]["steps"]] == [1]


def test_figures_are_valid_and_carry_their_data(two_runs):
    runs = load.load_runs(two_runs)
    styles = figures.run_styles(runs)
    curves = figures.validation_curves(0, runs, styles)
    ledger = figures.ledger_bars(runs)
    assert ledger is not None
    health = figures.health_figures(0, runs, styles)
    for figure in (curves, ledger, *health):
        go.Figure(figure.spec)  # raises on an unknown property or value
        assert len(figure.alt) > 40
        table = list(csv.reader(io.StringIO(figure.csv)))
        assert table[0] == list(figure.columns) and len(table) == len(figure.rows) + 1
        used = set(re.findall(r"#[0-9a-f]{6}", json.dumps(figure.spec)))
        assert used and used <= set(figures.PALETTE)
    assert "GRPO: " in curves.alt and "success rate" in curves.alt
    assert curves.axes["net"]["title"] == "net device-seconds"
    assert curves.axes["net"]["x"][1] == pytest.approx(runs[1].validation_net, rel=1e-5, abs=1e-3)
    assert curves.axes["net"]["shapes"][0]["x0"] == pytest.approx(runs[0].net_seconds(20))
    assert len({(s["colour"], s["dash"]) for s in styles.values()}) == 2


def test_styles_are_distinct_for_a_whole_study(two_runs):
    (run, _) = load.load_runs(two_runs)
    many = [dataclasses.replace(run, label=f"m{k}", method="x") for k in range(13)]
    looks = {(style["colour"], style["dash"]) for style in figures.run_styles(many).values()}
    assert len(looks) == 13


def test_transcripts_are_cut_to_a_share_and_say_so(two_runs):
    runs = [load_run(path) for path in two_runs]
    records, warnings = transcripts.collect(runs)
    assert warnings == [] and [record["omitted"] for record in records] == [0, 0]
    small, _ = transcripts.collect(runs, limit_bytes=12_000)
    assert all(record["omitted"] > 0 for record in small)
    assert all(record["steps"][-1]["step"] == 20 for record in small)  # the end of the training is kept first


def test_misaligned_token_values_are_refused(tmp_path):
    path = write_run(tmp_path, "sdar", teacher_s=0.5)
    file = path / "rollouts" / "step_000001.json"
    saved = json.loads(file.read_text())
    saved["episodes"][0]["turns"][0]["weight"].pop()
    file.write_text(json.dumps(saved))
    records, (warning,) = transcripts.collect([load_run(path)])
    assert "12 values of weight for 13 tokens" in warning
    assert [step["step"] for step in records[0]["steps"]] == [20]


def test_the_report_does_without_jax():
    """It runs where only files are: on a laptop, beside another trainer."""
    code = (
        "import sys, sdjax.report, sdjax.report.compare; sys.exit(any(m.split('.')[0] == 'jax' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_static_picture(two_runs, tmp_path):
    out = save_curves_png(two_runs, tmp_path / "curves.png")
    assert out.read_bytes().startswith(b"\x89PNG")

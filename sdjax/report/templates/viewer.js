"use strict";
// Transcript viewer. Everything that a model or an environment wrote goes through textContent.
(async function viewer() {
  const root = document.getElementById("viewer");
  if (!root) return;
  const runs = JSON.parse(await report.unpack("transcript-data"));
  const at = (id) => document.getElementById("v-" + id);
  const selects = { run: at("run"), step: at("step"), episode: at("episode"), colour: at("colour") };
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const fill = (select, texts, chosen) => {
    select.replaceChildren(...texts.map((text, index) => {
      const option = make("option", "", text);
      option.value = String(index);
      return option;
    }));
    select.value = String(Math.max(0, Math.min(chosen, texts.length - 1)));
  };
  const difference = (a, b) => a == null || b == null ? null : a - b;
  const number = (value, digits = 3) => value == null ? "–" : value.toFixed(digits).replace("-", "−");

  // value: one number per token; diverging scales are symmetric around 0.
  const streams = (weightName) => [
    { name: "teacher gap lT − lO, nats", diverging: true, has: (t) => t.logp_teacher, value: (t, i) => difference(t.logp_teacher[i], t.logp_old[i]), low: "teacher finds it less likely", high: "more likely" },
    { name: weightName, diverging: false, has: (t) => t.weight, value: (t, i) => t.weight[i], low: "0", high: "" },
    { name: "advantage", diverging: true, has: (t) => t.advantage, value: (t, i) => t.advantage[i], low: "discouraged", high: "encouraged" },
    { name: "log-prob lO, nats", diverging: false, has: (t) => t.logp_old, value: (t, i) => t.logp_old[i] == null ? null : -t.logp_old[i], low: "certain", high: "surprising", negated: true },
  ];
  let available = [];

  // Blue and orange differ for every common kind of colour vision; opacity carries the size, so text stays readable.
  const paint = (value, limit, diverging) => {
    if (value == null || !limit) return "transparent";
    const size = Math.min(1, Math.abs(value) / limit);
    const rgb = report.dark() ? (value < 0 ? "240,125,40" : "50,145,230") : (value < 0 ? "235,110,10" : "20,125,215");
    return `rgba(${diverging ? rgb : report.dark() ? "150,110,235" : "120,80,215"},${(0.72 * size).toFixed(3)})`;
  };
  const episode = () => runs[selects.run.value].steps[selects.step.value].episodes[selects.episode.value];
  const limitOf = (stream, turns) => {
    const values = turns.filter(stream.has).flatMap((turn) => turn.tokens.map((_, i) => Math.abs(stream.value(turn, i) ?? 0))).sort((a, b) => a - b);
    // The 98th percentile keeps one extreme token from bleaching all others.
    return values.length ? values[Math.floor(0.98 * (values.length - 1))] || values[values.length - 1] : 0;
  };
  const folded = (title, text) => {
    const details = make("details"), pre = make("pre", "text");
    details.append(make("summary", "", `${title} (${text.length.toLocaleString("en")} characters)`), pre);
    details.addEventListener("toggle", () => { if (details.open) pre.textContent = text; }, { once: true });
    return details;
  };
  const visible = (token) => token.replace(/\n/g, "⏎\n").replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

  const tokens = (turn, stream, limit, weightName) => {
    const box = make("div", "tokens");
    turn.tokens.forEach((token, i) => {
      const span = make("span", "", visible(token) || "∅");
      if (stream && stream.has(turn)) span.style.backgroundColor = paint(stream.value(turn, i), limit, stream.diverging);
      span.dataset.tip = [
        `token ${i + 1} of ${turn.tokens.length}  ${JSON.stringify(token)}`,
        `lO student    ${number(turn.logp_old && turn.logp_old[i])}`,
        ...(turn.logp_teacher ? [`lT teacher    ${number(turn.logp_teacher[i])}`, `gap lT − lO   ${number(difference(turn.logp_teacher[i], turn.logp_old && turn.logp_old[i]))}`] : []),
        ...(turn.weight ? [`${weightName.padEnd(13)} ${number(turn.weight[i])}`] : []),
        ...(turn.advantage ? [`advantage     ${number(turn.advantage[i])}`] : []),
      ].join("\n");
      box.append(span);
    });
    return box;
  };
  const scale = (stream, limit) => {
    const box = at("scale");
    box.replaceChildren();
    if (!stream) { box.textContent = "No per-token numbers were saved for this episode."; return; }
    const bar = make("span", "bar"), low = stream.diverging ? -limit : 0;
    const stops = [...Array(9).keys()].map((k) => paint(low + (limit - low) * k / 8, limit, stream.diverging));
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const end = stream.negated ? -limit : limit;
    box.append(make("span", "", stream.name + ":"), make("span", "", `${stream.diverging ? number(low, 2) : "0"} ${stream.low !== "0" ? stream.low : ""}`), bar, make("span", "", `${number(end, 2)} ${stream.high}`), make("span", "", "(98th percentile of this episode; beyond it the colour is full)"));
  };

  const show = () => {
    const run = runs[selects.run.value], step = run.steps[selects.step.value], one = episode();
    const previous = available[selects.colour.value] && available[selects.colour.value].name;
    available = streams(step.weight_name).filter((stream) => one.turns.some(stream.has));
    fill(selects.colour, available.map((stream) => stream.name), Math.max(0, available.findIndex((stream) => stream.name === previous)));
    const stream = available[selects.colour.value], limit = stream ? limitOf(stream, one.turns) : 0;
    at("note").textContent = run.omitted ? `${run.omitted} more episodes of this run are in its rollouts/ folder; they were left out to keep this file small.` : "";
    const facts = [["task", one.task], ["family", one.family], ["status", one.status], ["return", one.return], ["group", one.group], ["turns", one.turns.length]];
    at("head").replaceChildren(...facts.filter(([, value]) => value !== "" && value != null).map(([name, value]) => {
      const item = make("span", "", name + " ");
      item.append(make("b", "", String(value)));
      return item;
    }));
    scale(stream, limit);
    at("turns").replaceChildren(...one.turns.map((turn, k) => {
      const box = make("article", "turn"), head = make("div", "turn-head");
      head.append(make("b", "", `Turn ${k + 1}`), make("span", "", `action: ${turn.action || "–"}`));
      if (!turn.valid) head.append(make("span", "bad", "invalid action"));
      box.append(head, folded("prompt", turn.prompt));
      if (turn.privileged) box.append(folded("privileged text, teacher only", turn.privileged));
      box.append(tokens(turn, stream, limit, step.weight_name), make("div", "observation", turn.observation || "(end of episode)"));
      return box;
    }));
  };
  const steps = () => runs[selects.run.value].steps;
  const listEpisodes = () => {
    fill(selects.episode, steps()[selects.step.value].episodes.map((one, k) => `${k + 1}. ${one.status} · ${one.task.slice(0, 60)} · ${one.turns.length} turns`), 0);
    show();
  };
  const listSteps = () => { fill(selects.step, steps().map((step) => String(step.step)), steps().length - 1); listEpisodes(); };
  const move = (by) => {
    const count = selects.episode.options.length;
    selects.episode.value = String((Number(selects.episode.value) + by + count) % count);
    show();
  };
  fill(selects.run, runs.map((run) => `${run.run} · ${run.setting}`), runs.findIndex((run) => run.steps.some((step) => step.episodes.some((one) => one.turns.some((turn) => turn.logp_teacher)))));
  listSteps();
  selects.run.addEventListener("change", listSteps);
  selects.step.addEventListener("change", listEpisodes);
  selects.episode.addEventListener("change", show);
  selects.colour.addEventListener("change", show);
  at("prev").addEventListener("click", () => move(-1));
  at("next").addEventListener("click", () => move(1));
  document.addEventListener("themechange", show);

  const tip = at("tip");
  at("turns").addEventListener("pointerover", (event) => {
    if (!event.target.dataset.tip) { tip.hidden = true; return; }
    tip.textContent = event.target.dataset.tip;
    tip.hidden = false;
    const box = event.target.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (box.bottom + tip.offsetHeight + 8 > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6) + "px";
  });
  at("turns").addEventListener("pointerleave", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  document.documentElement.dataset.viewer = "ready";
})().catch(report.fail);

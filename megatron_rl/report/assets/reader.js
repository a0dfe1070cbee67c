"use strict";
// The rollout reader: filters, a list, and one rollout with its tokens. What a model wrote only ever becomes text.
(() => {
  const form = document.getElementById("filters");
  if (!form) return;
  const { rollouts, runs } = report.data;
  const list = document.getElementById("list"), detail = document.getElementById("detail");
  const VIEWS = { text: "text", logprob: "log-prob", ratio: "ratio of the update", mismatch: "trainer / engine", clipped: "clipped" };
  const GOOD = "correct";
  let shown = [], chosen = -1, view = "text", token = -1;

  const make = (tag, kind, text) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const number = (value, digits = 4) => value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits)));
  const haystacks = rollouts.map((r) => [r.prompt, r.text, r.gold ?? "", r.id, r.reason].join("\n").toLowerCase());

  function fill(name, values, label) {
    const select = form.elements[name];
    select.add(new Option(label, ""));
    for (const [value, text] of values) select.add(new Option(text, value));
  }
  const distinct = (of, order) => [...new Set(rollouts.map(of).filter((value) => value !== null && value !== ""))].sort(order);
  const up = (a, b) => a - b;
  fill("run", runs.map((name, index) => [String(index), name]), "all");
  fill("iteration", distinct((r) => r.iteration, up).reverse().map((i) => [String(i), String(i)]), "all");
  fill("verdict", distinct((r) => r.verdict).map((v) => [v, v.replaceAll("_", " ")]), "all");
  fill("difficulty", distinct((r) => r.difficulty, up).slice(0, 200).map((d) => [String(d), String(d)]), "all");
  if (runs.length < 2) form.querySelector("[data-only=runs]").hidden = true;

  function bound(name) {
    const text = form.elements[name].value;
    return text === "" ? null : Number(text);
  }

  function filter() {
    const field = (name) => form.elements[name].value;
    const words = field("text").toLowerCase().trim();
    const low = bound("rewardLow"), high = bound("rewardHigh"), short = bound("lengthLow"), long = bound("lengthHigh");
    const fits = (r, index) =>
      (!words || haystacks[index].includes(words)) &&
      (!field("run") || String(r.run) === field("run")) &&
      (!field("iteration") || String(r.iteration) === field("iteration")) &&
      (!field("verdict") || r.verdict === field("verdict")) &&
      (!field("difficulty") || String(r.difficulty) === field("difficulty")) &&
      (low === null || (r.reward ?? -Infinity) >= low) && (high === null || (r.reward ?? Infinity) <= high) &&
      (short === null || (r.length ?? -1) >= short) && (long === null || (r.length ?? Infinity) <= long) &&
      (!form.elements.withTokens.checked || r.tokens);
    shown = rollouts.filter(fits);
    const order = field("order");
    if (order) {
      const key = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
      shown.sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)));
    }
    document.getElementById("count").textContent = `${shown.length} of ${rollouts.length}`;
    list.replaceChildren(...shown.map(row));
    if (!shown.length) list.append(make("li", "none", "no rollout fits"));
    choose(shown.length ? 0 : -1);
  }

  function row(r, index) {
    const item = make("li");
    item.setAttribute("role", "option");
    item.id = `rollout-${index}`;
    const head = make("div", "row");
    head.append(make("b", r.verdict === GOOD ? "good" : "bad", (r.verdict === GOOD ? "✓ " : "✗ ") + r.verdict.replaceAll("_", " ")));
    head.append(make("span", "", `${number(r.reward, 3)} · ${r.length ?? "?"} tok · it ${r.iteration}${r.tokens ? " · ◧" : ""}`));
    item.append(head, make("div", "words", (runs.length > 1 ? `${runs[r.run]}: ` : "") + r.prompt.slice(0, 160)));
    item.addEventListener("click", () => choose(index));
    return item;
  }

  function choose(index) {
    list.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    chosen = index;
    if (index < 0) { detail.replaceChildren(); list.removeAttribute("aria-activedescendant"); return; }
    const item = list.children[index];
    item.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", item.id);
    // not scrollIntoView: that would move the page as well
    if (item.offsetTop < list.scrollTop) list.scrollTop = item.offsetTop - list.offsetTop;
    const over = item.offsetTop - list.offsetTop + item.offsetHeight - list.scrollTop - list.clientHeight;
    if (over > 0) list.scrollTop += over;
    if (item.offsetTop - list.offsetTop < list.scrollTop) list.scrollTop = item.offsetTop - list.offsetTop;
    show(shown[index]);
  }

  function show(r) {
    const tags = make("div", "tags");
    const tag = (text, kind = "") => tags.append(make("span", `tag ${kind}`, text));
    tag(r.verdict.replaceAll("_", " "), r.verdict === GOOD ? "good" : "bad");
    tag(`reward ${number(r.reward)}`);
    for (const [name, value] of Object.entries(r.parts)) tag(`${name} ${number(value)}`);
    if (r.tokens?.advantage !== null && r.tokens?.advantage !== undefined) tag(`advantage ${number(r.tokens.advantage, 3)}`);
    tag(`${r.length ?? "?"} tokens`);
    if (r.finish) tag(r.finish === "length" ? "cut at the limit" : r.finish);
    if (r.difficulty !== null) tag(`difficulty ${number(r.difficulty)}`);
    tag(`iteration ${r.iteration}`);
    if (r.versions.length) tag(`weights ${r.versions.map(([count, version]) => version + (count === null ? "" : ` (${count} tokens)`)).join(", ")}`);
    tag(`${r.id} / ${r.sample}`);
    const parts = [tags];
    if (r.reason) parts.push(make("p", "note", `grader: ${r.reason}`));
    parts.push(make("h3", "", "prompt"), make("pre", "prompt", r.prompt));
    if (r.gold !== null) parts.push(make("h3", "", "gold"), make("pre", "gold", r.gold));
    parts.push(views(r));
    const { think, answer } = split(r.text);
    if (view !== "text" && r.tokens) parts.push(make("h3", "", "completion, token by token"), tokens(r.tokens), make("output", "facts-line", "point at a token, or → and ← here"));
    else {
      if (think !== null) parts.push(make("h3", "", "think"), make("pre", "think", think));
      parts.push(make("h3", "", "answer"), make("pre", "answer", answer));
    }
    token = -1;
    detail.replaceChildren(...parts);
    detail.scrollTop = 0;
  }

  // a template may have written the opening tag already; without a closing one all of it may be thought
  function split(text) {
    const end = text.lastIndexOf("</think>");
    if (end < 0) return text.startsWith("<think>") ? { think: text.slice(7), answer: "" } : { think: null, answer: text };
    const start = text.startsWith("<think>") ? 7 : 0;
    return { think: text.slice(start, end).trim(), answer: text.slice(end + 8).trim() };
  }

  function views(r) {
    const row = make("div", "views");
    if (!r.tokens) { row.append(make("span", "note", "tokens of this rollout were not kept")); return row; }
    for (const [name, label] of Object.entries(VIEWS)) {
      const button = make("button", "", label);
      button.type = "button";
      button.dataset.view = name;
      button.setAttribute("aria-pressed", String(name === view));
      button.addEventListener("click", () => see(name));
      row.append(button);
    }
    row.append(scale());
    if (!r.tokens.old_logprobs) row.append(make("span", "note", "not trained on: the engine's log-probs alone"));
    return row;
  }

  function see(name) {
    view = name;
    if (chosen >= 0) show(shown[chosen]);
  }

  const BLUE = "86,180,233", ORANGE = "230,120,30";
  const opaque = (tone, share) => `rgba(${tone},${Math.min(1, Math.max(0, share)) * 0.85})`;
  // shares of the full colour: at 1 % probability, at a ratio of 1.5, at a mismatch of 5 %
  const FULL = { logprob: Math.log(100), ratio: Math.log(1.5), mismatch: Math.log(1.05) };

  function scale() {
    const row = make("span", "scale");
    const step = (tone, share, text) => {
      const box = make("i");
      box.style.background = opaque(tone, share);
      row.append(box, make("span", "", text));
    };
    if (view === "logprob") { step(ORANGE, 0.15, "p 0.5"); step(ORANGE, 0.5, "0.1"); step(ORANGE, 1, "0.01 and less"); }
    if (view === "ratio") { step(BLUE, 1, "÷ 1.5"); step(BLUE, 0, "1"); step(ORANGE, 1, "× 1.5: new / old policy in its update"); }
    if (view === "mismatch") { step(BLUE, 1, "÷ 1.05"); step(BLUE, 0, "1"); step(ORANGE, 1, "× 1.05: trainer / engine"); }
    if (view === "clipped") { step(BLUE, 1, "clipped below"); step(ORANGE, 1, "clipped above, in its update"); }
    return row;
  }

  const minus = (a, b) => (a ?? null) === null || (b ?? null) === null ? null : a - b;

  function tokens(kept) {
    const text = make("pre", "tokens");
    const { tokens: pieces, rollout_logprobs: sampled, old_logprobs: old, logprobs: now, clipped, left_out: gap } = kept;
    pieces.forEach((piece, i) => {
      if (gap && i === gap[0]) text.append(make("span", "note", `\n[… ${gap[1]} tokens left out …]\n`));
      // null: not recorded, or not a finite number
      const sample = sampled?.[i] ?? null, mismatch = minus(old?.[i], sample), ratio = minus(now?.[i], old?.[i]);
      const clip = clipped ? clipped[i] : 0;
      const span = make("span", "t", piece);
      if (view === "logprob" && sample !== null) span.style.background = opaque(ORANGE, -sample / FULL.logprob);
      const gapOf = view === "ratio" ? ratio : view === "mismatch" ? mismatch : null;
      if (gapOf) span.style.background = opaque(gapOf > 0 ? ORANGE : BLUE, Math.abs(gapOf) / FULL[view]);
      if (view === "clipped" && clip) span.style.background = opaque(clip > 0 ? ORANGE : BLUE, 1);
      if (clip) span.classList.add(clip > 0 ? "high" : "low");
      const facts = [JSON.stringify(piece)];
      if (sample !== null) facts.push(`log-prob ${number(sample)}, p ${number(Math.exp(sample), 3)}`);
      else if (sampled) facts.push("log-prob not finite");
      if (mismatch !== null) facts.push(`trainer / engine ${number(Math.exp(mismatch), 6)}`);
      if (ratio !== null) facts.push(`ratio of the update ${number(Math.exp(ratio), 6)}`);
      if (clip) facts.push(clip > 0 ? "clipped above" : "clipped below");
      if (!old) facts.push("not trained on");
      span.dataset.facts = facts.join(" · ");
      text.append(span);
    });
    return text;
  }

  function point(index) {
    const all = detail.querySelectorAll(".t");
    if (!all.length) return;
    all[token]?.classList.remove("at");
    token = Math.max(0, Math.min(all.length - 1, index));
    all[token].classList.add("at");
    detail.querySelector(".facts-line").textContent = `${token + 1}: ${all[token].dataset.facts}`;
  }
  detail.addEventListener("mouseover", (event) => {
    if (event.target.classList.contains("t")) point([...detail.querySelectorAll(".t")].indexOf(event.target));
  });

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, select, textarea");
    if (event.key === "Escape" && typing) { typing.blur(); list.focus({ preventScroll: true }); return; }
    if (typing) return;
    const inList = document.activeElement === list, inDetail = document.activeElement === detail;
    if (inDetail && (event.key === "ArrowRight" || event.key === "ArrowLeft")) {
      event.preventDefault();
      point(token + (event.key === "ArrowRight" ? 1 : -1));
      return;
    }
    const move = { j: 1, k: -1, ...(inList ? { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 } : {}) }[event.key];
    if (move && shown.length) {
      event.preventDefault();
      choose(Math.max(0, Math.min(shown.length - 1, chosen + move)));
    } else if (event.key === "/") {
      event.preventDefault();
      form.elements.text.focus();
    } else {
      const name = Object.keys(VIEWS)[Number(event.key) - 1];
      if (name) see(name);
    }
  });
  filter();
})();

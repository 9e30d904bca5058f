// The playground: sends a question to each side, and shows the answers as they arrive. Conversations live in this page only.
"use strict";

(() => {
  const form = document.querySelector("[data-ask]");
  if (!form) return;
  const find = (name) => form.querySelector(`[data-${name}]`);
  const [sample, raw, own, shown, stop] = ["sample", "raw", "own", "shown", "stop"].map(find);
  const base = document.querySelector("[data-base]");
  const sides = [...document.querySelectorAll("[data-side]")].map((section) => ({
    name: section.dataset.side,
    isTrained: "trained" in section.dataset,
    isCold: "cold" in section.dataset,
    turns: section.querySelector(".turns"),
    history: [], // of a model without a template: each of its questions continues the conversation
  }));
  const empty = sides[0].turns.innerHTML;
  let asking = null; // an AbortController while answers arrive

  const element = (parent, className, text = "") => {
    const made = document.createElement("p");
    made.className = className;
    made.textContent = text;
    parent.append(made);
    return made;
  };
  const fields = () => [...own.querySelectorAll("textarea")].filter((area) => area.offsetParent);

  // What is asked: a held-out question, the fields of the template, or a message without it.
  function arrange() {
    const chosen = sample?.selectedOptions[0];
    const isOwn = !chosen?.value;
    own.hidden = !isOwn;
    shown.hidden = isOwn;
    shown.textContent = isOwn ? "" : chosen.dataset.question;
    for (const area of own.querySelectorAll("textarea")) {
      area.parentElement.hidden = (area.name === "raw") !== Boolean(raw?.checked);
    }
    if (base) {
      base.hidden = isOwn;
      for (const name of ["before", "expected"]) base.querySelector(`[data-${name}]`).textContent = isOwn ? "" : chosen.dataset[name];
    }
  }
  sample?.addEventListener("change", arrange);
  raw?.addEventListener("change", () => { clear(); arrange(); });
  arrange();

  function question(side) {
    const number = (name) => form.elements[name].value === "" ? null : Number(form.elements[name].value);
    const values = Object.fromEntries(fields().map((area) => [area.name.replace("field:", ""), area.value]));
    if ("raw" in values) values.message = values.raw;
    else if (!("message" in values)) values.message = Object.values(values).join("\n"); // for a side without a template
    delete values.raw;
    return {
      of: side.name,
      values,
      sample: sample?.value ? Number(sample.value) : null,
      is_raw: Boolean(raw?.checked),
      system: form.elements.system.value || null,
      history: side.history,
      max_tokens: number("max_tokens"),
      temperature: number("temperature"),
    };
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asking) return;
    const missing = fields().find((area) => !area.value.trim());
    if (!own.hidden && missing) { missing.focus(); return; }
    asking = new AbortController();
    form.querySelector(".primary").disabled = true;
    stop.hidden = false;
    await Promise.all(sides.map((side) => ask(side, asking.signal)));
    asking = null;
    form.querySelector(".primary").disabled = false;
    stop.hidden = true;
  });

  async function ask(side, signal) {
    const asked = question(side), began = performance.now();
    if (side.turns.innerHTML === empty) side.turns.replaceChildren();
    side.turns.setAttribute("aria-busy", "true"); // a screen reader waits for the whole answer
    element(side.turns, "asked", own.hidden ? shown.textContent : Object.values(asked.values).length > 1 && side.isTrained && !asked.is_raw
      ? fields().map((area) => `${area.name.replace("field:", "")}: ${area.value}`).join("\n") : asked.values.message);
    const said = element(side.turns, "said"), state = element(side.turns, "s state", "Waiting for the first word");
    const cold = setTimeout(() => {
      state.textContent = "No word yet. " + (side.isCold ? "An endpoint that scaled to zero loads its model first, which takes minutes." : "The endpoint is busy, or it starts.");
    }, 4000);
    let first = 0, end = null;
    try {
      for await (const part of answer(asked, signal)) {
        if (part.text) {
          clearTimeout(cold);
          first ||= performance.now();
          said.textContent += part.text;
          state.textContent = "";
          side.turns.scrollTop = side.turns.scrollHeight;
        } else end = part;
      }
      end ??= { error: "The connection to the console was cut.", hint: "" };
    } catch (error) {
      end = signal.aborted ? { stopped: true } : { error: `The console cannot be reached: ${error.message}`, hint: "" };
    }
    clearTimeout(cold);
    finish(side, asked, said, state, end, first - began, performance.now() - began);
  }

  function finish(side, asked, said, state, end, first, all) {
    const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(1)} s`;
    if (end.end) {
      state.textContent = `first word after ${seconds(Math.max(0, first))}, whole answer after ${seconds(all)}`;
      if (end.end === "length") state.textContent += "; cut at the greatest number of tokens";
      if (asked.sample === null && (asked.is_raw || !side.isTrained)) {
        side.history.push({ role: "user", content: asked.values.message }, { role: "assistant", content: said.textContent });
      }
    } else if (end.stopped) {
      state.textContent = `Stopped after ${seconds(all)}`;
    } else {
      state.className = "state bad-text";
      state.textContent = [said.textContent && "The answer above is not whole.", end.error, end.hint].filter(Boolean).join(" ");
    }
    side.turns.setAttribute("aria-busy", "false");
    side.turns.scrollTop = side.turns.scrollHeight;
  }

  async function* answer(asked, signal) {
    const headers = { "content-type": "application/json" };
    const response = await fetch("/ask", { method: "POST", headers, body: JSON.stringify(asked), signal });
    if (!response.ok) {
      yield { error: `The console refused the question (HTTP ${response.status}).`, hint: response.status === 401 ? "Open a new link: dropforge open" : "" };
      return;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }

  function clear() {
    for (const side of sides) { side.history = []; side.turns.innerHTML = empty; }
  }
  stop.addEventListener("click", () => asking?.abort());
  find("clear").addEventListener("click", () => { asking?.abort(); clear(); });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
})();

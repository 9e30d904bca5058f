// Keeps a page up to date, and adds the keyboard. Without this script, each page still shows what it showed when it loaded.
"use strict";

(() => {
  const FOCUSABLE = "a, button, input, [tabindex]";
  const parts = new Map(); // id of a part: its HTML as the server sent it, without ages
  const all = (root) => root.querySelectorAll("[data-live]");
  const lasting = (part) => {
    const copy = part.cloneNode(true);
    for (const time of copy.querySelectorAll("time[data-ago]")) time.textContent = "";
    return copy.outerHTML;
  };
  for (const part of all(document)) parts.set(part.id, lasting(part));

  // Ages.
  const units = [["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172800], ["d", 86400, Infinity]];
  function ages() {
    for (const time of document.querySelectorAll("time[data-ago]")) {
      const seconds = Math.max(0, (Date.now() - Date.parse(time.dateTime)) / 1000);
      const [unit, length] = units.find(([, , most]) => seconds < most);
      time.textContent = `${Math.floor(seconds / length)} ${unit} ${time.dataset.ago}`.trim();
    }
  }
  ages();
  setInterval(ages, 5000);

  // Content: a change makes the page fetch itself, and replace the parts that differ.
  let fetching = false, again = false;
  async function refresh() {
    if (fetching) { again = true; return; }
    fetching = true;
    try {
      // Identity-Aware Proxy answers 401 to requests with the second header, and a redirect to others.
      const response = await fetch(location.href, { headers: { accept: "text/html", "x-requested-with": "XMLHttpRequest" } });
      if (response.status === 401) signedOut();
      if (!response.ok) return;
      if (document.querySelector("[data-awaited]")) { location.reload(); return; } // a run that is accepted only now
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      for (const part of all(page)) replace(part);
      document.title = page.title;
      ages();
    } catch { /* the stream connects again, and with it the page is fetched again */ } finally {
      fetching = false;
      if (again) { again = false; refresh(); }
    }
  }

  function signedOut() {
    const trouble = document.getElementById("trouble");
    trouble.textContent = "This browser is signed out, so this page is old. Reload the page.";
    trouble.hidden = false;
    parts.delete("trouble");
  }

  function replace(part) {
    const old = document.getElementById(part.id);
    const html = lasting(part);
    if (!old || parts.get(part.id) === html) return;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && [...old.querySelectorAll(FOCUSABLE)].indexOf(focused);
    parts.set(part.id, html);
    const opened = [...old.querySelectorAll("details")].map((details) => details.open);
    part.querySelectorAll("details").forEach((details, index) => { details.open = opened[index] ?? false; });
    const marked = new Set([...old.querySelectorAll("input:checked")].map((input) => input.value));
    for (const input of part.querySelectorAll("input")) input.checked = marked.has(input.value);
    old.replaceWith(document.adoptNode(part));
    if (focused) part.querySelectorAll(FOCUSABLE)[place]?.focus({ preventScroll: true });
  }

  // One stream while the page is visible: browsers allow six connections to a server.
  let stream = null;
  function connect() {
    const address = document.body.dataset.stream;
    if (document.hidden) { stream?.close(); stream = null; return; }
    if (!address || stream) return;
    stream = new EventSource(address);
    stream.addEventListener("change", refresh);
    stream.addEventListener("error", lost);
  }
  function lost() { // a browser connects again after a lost connection, but not after an answer that is an error
    if (stream?.readyState !== EventSource.CLOSED) return;
    stream = null;
    refresh();
    setTimeout(connect, 5000);
  }
  document.addEventListener("visibilitychange", connect);
  connect();

  // A spec is checked as somebody types it. The newest text wins.
  const spec = document.querySelector("[data-check]");
  let pause = null, check = null;
  spec?.addEventListener("input", () => {
    clearTimeout(pause);
    check?.abort();
    pause = setTimeout(judge, 300);
  });
  async function judge() {
    check = new AbortController();
    const body = new URLSearchParams({ spec: spec.value, do: "type" });
    try {
      const response = await fetch("/new", { method: "POST", body, signal: check.signal });
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const verdict = page.getElementById("verdict");
      if (verdict) document.getElementById("verdict").replaceChildren(...verdict.childNodes);
    } catch { /* a newer text, or no connection: Check and Drop say what is wrong */ }
  }

  // Filters apply as they change. Keys: / searches, j and k move among the runs, Enter opens a run, x marks it, c compares
  // the marked runs, ? shows the keys.
  const filters = document.querySelector("form.filters");
  filters?.addEventListener("change", () => filters.requestSubmit());
  document.addEventListener("keydown", (event) => {
    const typed = event.target.closest("input:not([type=checkbox]), select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || typed) return;
    if (event.key === "/") {
      const find = document.querySelector("[data-find]");
      if (find) { event.preventDefault(); find.focus(); }
    } else if (event.key === "j" || event.key === "k") {
      const links = [...document.querySelectorAll("[data-row] a")];
      const next = links.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
      links[Math.max(0, Math.min(next, links.length - 1))]?.focus();
    } else if (event.key === "x") {
      document.activeElement.closest("[data-row]")?.querySelector("input").click();
    } else if (event.key === "c") {
      if (document.querySelector("[data-row] input:checked")) document.querySelector("[data-compare]").requestSubmit();
    } else if (event.key === "?") {
      document.getElementById("keys").showModal();
    }
  });
})();

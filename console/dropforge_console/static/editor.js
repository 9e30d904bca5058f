// The editor of a job spec: completion and help by its JSON Schema, in the page's own textarea. Without this script, or
// without the schema, it is a textarea. What is wrong says the server (console.js), in the words of `dropforge submit`.
"use strict";

(async () => {
  const area = document.querySelector("[data-schema]");
  if (!area) return;
  const help = document.getElementById("help"), list = document.getElementById("choices");
  const root = await fetch(area.dataset.schema).then((response) => response.ok && response.json()).catch(() => null);
  if (!root) return;

  // The JSON text up to any error: its tokens in order, each with the object or array that it is in.
  function scan(text) {
    const top = { parent: null, kind: "top", key: "", isKey: false, values: {}, begin: 0, end: text.length };
    const tokens = [], frames = [top];
    let frame = top;
    for (const match of text.matchAll(/"(?:[^"\\\n]|\\.)*"?|[{}[\],:]|[^\s"{}[\],:]+/g)) {
      const token = match[0], begin = match.index, end = begin + token.length;
      if (token === "{" || token === "[") {
        frame = { parent: frame, under: frame.key, kind: token, key: token === "[" ? 0 : "", isKey: token === "{", values: {}, begin, end: text.length };
        frames.push(frame);
      } else if (token === "}" || token === "]") {
        frame.end = begin;
        frame = frame.parent ?? top;
      } else if (token === ":") frame.isKey = false;
      else if (token === ",") {
        if (frame.kind === "[") frame.key += 1;
        else frame.isKey = frame.kind === "{";
      } else {
        const isWhole = token[0] !== '"' || /^"(?:[^"\\]|\\.)*"$/.test(token);
        const value = token[0] === '"' ? token.slice(1, isWhole ? -1 : undefined) : token;
        tokens.push({ frame, begin, end, value, isKey: frame.isKey, key: frame.isKey ? value : frame.key, isString: token[0] === '"', isWhole: isWhole && token[0] === '"' });
        if (frame.isKey) { frame.key = value; frame.values[value] ??= undefined; } else frame.values[frame.key] = value;
      }
    }
    return { tokens, frames };
  }

  // What is at a place: the token that touches it, and the object or array around it.
  function at(place) {
    const { tokens, frames } = scan(area.value);
    const token = tokens.find(({ begin, end, isWhole }) => begin < place && (place < end || (place === end && !isWhole)));
    const frame = token?.frame ?? frames.findLast(({ begin, end }) => begin < place && place <= end) ?? frames[0];
    const before = area.value.slice(frame.begin + 1, place).match(/([,:{[])\s*$/)?.[1];
    const last = tokens.findLast((one) => one.frame === frame && one.end <= place);
    const isKey = token ? token.isKey : frame.kind === "{" && before !== ":";
    return { token, frame, isKey, key: token?.key ?? (frame.kind === "[" ? 0 : last?.key), place };
  }

  // The schemas that may hold for an object or array: of alternatives, those that agree with the constants in the text.
  function expand(schema) {
    if (schema.$ref) return expand(root.$defs[schema.$ref.split("/").pop()]);
    const parts = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])];
    return parts.length ? parts.flatMap(expand) : [schema];
  }
  function schemasOf(frame, but) { // whatever the text says of the field `but`
    if (frame.kind === "top") return [];
    const all = frame.parent.kind === "top" ? expand(root) : childrenOf(frame.parent, frame.under).flatMap(expand);
    const agreed = all.filter((schema) => Object.entries(schema.properties ?? {}).every(([name, property]) =>
      name === but || property.const === undefined || frame.values[name] === undefined || property.const === frame.values[name]));
    return agreed.length ? agreed : all;
  }
  const childrenOf = (frame, key) => schemasOf(frame, key).flatMap((schema) =>
    frame.kind === "[" ? schema.items ?? [] : schema.properties?.[key] ?? (schema.additionalProperties || []));

  function typeOf(schema) {
    const words = expand(schema).map((one) => one.const !== undefined ? JSON.stringify(one.const) : one.enum?.map((value) => JSON.stringify(value)).join(" or ") ?? one.type);
    return [...new Set(words)].filter(Boolean).join(" or ");
  }
  const textOf = (schema) => [typeOf(schema), schema.description ?? expand(schema)[0]?.description,
    schema.default === undefined || typeof schema.default === "object" ? "" : `Default: ${JSON.stringify(schema.default)}.`].filter(Boolean).join(". ").replace(/\.\. /g, ". ");

  function choicesAt({ token, frame, isKey, key, place }) {
    const typed = token ? area.value.slice(token.begin + Number(token.isString), place) : "", made = new Map();
    if (isKey) {
      for (const schema of schemasOf(frame)) for (const [name, property] of Object.entries(schema.properties ?? {})) {
        if (name in frame.values && name !== token?.value) continue;
        const [one] = expand(property);
        const value = one.const !== undefined ? JSON.stringify(one.const) : { string: '""', object: "{}", array: "[]" }[one.type] ?? "";
        const text = `${JSON.stringify(name)}: ${value}`, isOther = made.has(name) && made.get(name).text !== text;
        made.set(name, { text: isOther ? `${JSON.stringify(name)}: ""` : text, back: isOther || /^(""|{}|\[\])$/.test(value) ? 1 : 0, about: property.description ?? typeOf(property) });
      }
    } else {
      for (const schema of childrenOf(frame, key)) for (const one of expand(schema)) {
        const values = one.enum ?? (one.const !== undefined ? [one.const] : one.type === "boolean" ? [true, false] : one.type === "null" ? [null] : one.examples ?? (one.default !== undefined ? [one.default] : []));
        for (const value of values) made.set(String(value), { text: JSON.stringify(value), back: 0, about: one.const !== undefined ? one.description ?? "" : "" });
      }
    }
    const choices = [...made].filter(([name]) => name.startsWith(typed)).map(([name, choice]) => ({ name, ...choice }));
    return choices.length === 1 && choices[0].name === token?.value ? [] : choices; // nothing is left to choose
  }

  // The list at the caret, and the help for what the caret is in.
  const style = getComputedStyle(area), pen = document.createElement("canvas").getContext("2d");
  pen.font = `${style.fontSize} ${style.fontFamily}`;
  const [wide, high, left, top] = [pen.measureText("m").width, ...[style.lineHeight, style.paddingLeft, style.paddingTop].map(parseFloat)];
  let shown = [], marked = 0, place = null;
  const close = () => { shown = []; list.hidden = true; area.removeAttribute("aria-activedescendant"); };
  function mark(number) {
    marked = (number + shown.length) % shown.length;
    [...list.children].forEach((item, index) => item.setAttribute("aria-selected", String(index === marked)));
    area.setAttribute("aria-activedescendant", list.children[marked].id);
    list.children[marked].scrollIntoView({ block: "nearest" });
  }
  function open() {
    place = at(area.selectionStart);
    shown = choicesAt(place);
    if (!shown.length) return close();
    list.replaceChildren(...shown.map(({ name, about }, index) => {
      const item = document.createElement("li"), text = document.createElement("small");
      text.textContent = about;
      item.append(name, " ", text);
      item.id = `choice-${index}`;
      item.setAttribute("role", "option");
      item.addEventListener("mousedown", (event) => { event.preventDefault(); marked = index; take(); });
      return item;
    }));
    const lines = area.value.slice(0, place.token?.begin ?? area.selectionStart).split("\n");
    list.hidden = false;
    list.style.top = `${area.offsetTop + top + high * lines.length - area.scrollTop + 2}px`;
    list.style.left = `${Math.max(0, Math.min(area.offsetLeft + left + wide * lines.at(-1).length - area.scrollLeft, area.clientWidth - list.offsetWidth))}px`;
    mark(0);
  }
  function insert(text, begin, end) {
    area.setSelectionRange(begin, end);
    if (!document.execCommand("insertText", false, text)) area.setRangeText(text, begin, end, "end"); // the first can be undone
  }
  function take() {
    const { text, back } = shown[marked], { token, isKey } = place, caret = area.selectionStart;
    const rest = area.value.slice(token?.end ?? caret);
    const isNamed = isKey && /^\s*:/.test(rest);
    const comma = !isNamed && isKey && /^\s*"/.test(rest) ? "," : "";
    insert((isNamed ? text.slice(0, text.indexOf(":")) : text) + comma, token?.begin ?? caret, token?.end ?? caret);
    if (!isNamed) area.setSelectionRange(area.selectionStart - back - comma.length, area.selectionStart - back - comma.length);
    close();
    explain();
  }
  function explain() {
    const { frame, key } = at(area.selectionStart);
    const [schema] = childrenOf(frame, key ?? "");
    help.textContent = schema ? `${key}: ${textOf(schema)}` : "Ctrl+Space lists what may stand here.";
  }

  area.addEventListener("keydown", (event) => {
    const { key, ctrlKey } = event, isOpen = shown.length > 0;
    if (key === " " && ctrlKey) open();
    else if (isOpen && (key === "ArrowDown" || key === "ArrowUp")) mark(marked + (key === "ArrowDown" ? 1 : -1));
    else if (isOpen && (key === "Enter" || key === "Tab")) take();
    else if (isOpen && key === "Escape") close();
    else if (key === "Enter" && !event.shiftKey) {
      const before = area.value.slice(0, area.selectionStart), indent = before.match(/[^\n]*$/)[0].match(/^ */)[0];
      insert(`\n${indent}${/[{[]\s*$/.test(before) ? "  " : ""}`, area.selectionStart, area.selectionEnd);
    } else return;
    event.preventDefault();
  });
  area.addEventListener("input", (event) => { if (event.inputType === "insertText" && /["\w]/.test(event.data ?? "")) open(); else close(); });
  area.addEventListener("mousemove", ({ offsetX, offsetY }) => {
    const lines = area.value.split("\n"), line = Math.floor((offsetY - top + area.scrollTop) / high);
    const column = Math.floor((offsetX - left + area.scrollLeft) / wide), start = lines.slice(0, line).join("\n").length + (line ? 1 : 0);
    const found = line < lines.length && column < lines[line].length ? at(start + column + 1) : null;
    const [schema] = found?.token ? childrenOf(found.frame, found.key) : [];
    area.title = schema ? `${found.key}: ${textOf(schema)}` : "";
  });
  area.addEventListener("blur", close);
  area.addEventListener("scroll", close);
  for (const name of ["keyup", "click"]) area.addEventListener(name, explain);
  explain();

  // A problem of the spec leads to its place.
  function locate(pointer) {
    const path = pointer.split("/").slice(1).map((part) => part.replace(/~1/g, "/").replace(/~0/g, "~"));
    const { tokens } = scan(area.value);
    const pathOf = (frame) => frame.parent?.kind && frame.parent.kind !== "top" ? [...pathOf(frame.parent), String(frame.under)] : [];
    for (let length = path.length; length; length -= 1) {
      const wanted = path.slice(0, length).join("/");
      const found = tokens.find(({ frame, key, isKey }) => (isKey || frame.kind === "[") && [...pathOf(frame), String(key)].join("/") === wanted);
      if (found) return found;
    }
    return null;
  }
  document.getElementById("verdict").addEventListener("click", (event) => {
    const found = event.target.dataset.pointer === undefined ? null : locate(event.target.dataset.pointer);
    area.focus();
    if (!found) return;
    area.setSelectionRange(found.begin, found.end);
    area.scrollTop = high * (area.value.slice(0, found.begin).split("\n").length - 5);
    explain();
  });
})();

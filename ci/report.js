"use strict";

const PAGE = 25;
const COLUMNS = [
  ["case", (row) => row.case],
  ["subject", (row) => row.subject],
  ["mode", (row) => row.mode],
  ["execution", (row) => row.execution],
  ["verdict", (row) => row.verdict],
  ["error ÷ allowed", (row) => row.worst],
  ["seconds", (row) => row.seconds],
  ["message", (row) => row.message],
];
const rows = JSON.parse(document.getElementById("rows").textContent);
const find = (id) => document.getElementById(id);
const state = { cell: null, sort: 5, descending: true, shown: PAGE };

for (const row of rows) {
  row.values = Object.entries(row.axes).map(([axis, value]) => `${axis}=${value}`);
  const words = [row.case, row.subject, row.place, row.family, row.mode, row.execution, row.verdict, row.message];
  row.text = ` ${[...words, ...row.values].join(" ")} `.toLowerCase();
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function ratio(row) {
  if (!row.quantities.length) return "–";
  if (row.worst > 1e300) return "∞";
  return row.worst < 10 ? row.worst.toFixed(2) : row.worst.toPrecision(3);
}

function selected() {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const onlyRed = find("only-red").checked;
  const value = COLUMNS[state.sort][1];
  const sign = state.descending ? -1 : 1;
  return rows
    .filter((row) => !onlyRed || row.red)
    .filter((row) => !state.cell || Object.entries(state.cell).every(([name, is]) => row[name] === is))
    .filter((row) => words.every((word) => row.text.includes(word.includes("=") ? ` ${word} ` : word)))
    .sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) || b.red - a.red);
}

function quantities(row) {
  const names = ["quantity", "error", "allowed", "error ÷ allowed", "where"];
  const head = element("tr", {}, ...names.map((name) => element("th", { scope: "col", textContent: name })));
  const body = row.quantities.map(([name, error, allowed, times, where, bad]) =>
    element("tr", {}, ...[name, error, allowed, times, where].map((text, i) =>
      element("td", { textContent: text, className: (i && i < 4 ? "number " : "") + (i === 3 && bad ? "bad" : "") }))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function copyButton(text) {
  const button = element("button", { type: "button", className: "copy", textContent: "copy" });
  button.addEventListener("click", () =>
    navigator.clipboard.writeText(text).then(
      () => { button.textContent = "copied"; },
      () => { button.textContent = "select it by hand"; }));
  return button;
}

function detail(row) {
  const parts = [];
  if (row.message) parts.push(element("p", { textContent: row.message }));
  if (row.quantities.length) parts.push(quantities(row));
  const effects = Object.entries(row.effects).map(([name, count]) => `${name.replaceAll("_", " ")} ${count}`);
  if (effects.length) parts.push(element("p", { textContent: "effects: " + effects.join(", ") }));
  if (row.accept_lengths.length) {
    parts.push(element("p", { textContent: "accept lengths: " + row.accept_lengths.join(" ") }));
  }
  if (row.reproduce) {
    parts.push(element("p", {}, "reproduce: ", element("code", { textContent: row.reproduce }), copyButton(row.reproduce)));
  }
  if (row.values.length) parts.push(element("p", { textContent: row.values.join(" ") }));
  const facts = [row.family, row.place, row.recorded].filter(Boolean);
  parts.push(element("p", { textContent: facts.join(", ") }));
  return element("tr", { className: "detail" }, element("td", { colSpan: COLUMNS.length }, ...parts));
}

function line(row) {
  const open = element("button", { type: "button", className: "open", textContent: row.case, ariaExpanded: "false" });
  const verdictClass = row.red ? "bad" : row.verdict === "passed" ? "good" : "";
  const made = element("tr", {},
    element("td", {}, open),
    element("td", { textContent: row.subject }),
    element("td", { textContent: row.mode }),
    element("td", { textContent: row.execution }),
    element("td", { textContent: row.verdict, className: verdictClass }),
    element("td", { textContent: ratio(row), className: "number" + (row.worst > 1 ? " bad" : "") }),
    element("td", { textContent: row.seconds.toFixed(3), className: "number" }),
    element("td", { textContent: row.message, className: "message" }));
  open.addEventListener("click", () => {
    const expand = open.ariaExpanded === "false";
    open.ariaExpanded = String(expand);
    if (expand) made.after(detail(row));
    else made.nextSibling.remove();
  });
  return made;
}

function heads() {
  return COLUMNS.map(([name], index) => {
    const arrow = index !== state.sort ? "" : state.descending ? " ↓" : " ↑";
    const button = element("button", { type: "button", className: "sort", textContent: name + arrow });
    button.addEventListener("click", () => {
      state.descending = index === state.sort ? !state.descending : index === 5 || index === 6;
      state.sort = index;
      draw();
      find("heads").children[index].firstChild.focus();
    });
    const sorted = index !== state.sort ? "none" : state.descending ? "descending" : "ascending";
    return element("th", { scope: "col", ariaSort: sorted }, button);
  });
}

function draw() {
  const found = selected();
  find("heads").replaceChildren(...heads());
  find("cases").replaceChildren(...found.slice(0, state.shown).map(line));
  find("count").textContent = `${found.length} of ${rows.length}`;
  find("more").hidden = found.length <= state.shown;
  find("clear").hidden = !state.cell;
  find("clear").textContent = state.cell ? "× " + Object.values(state.cell).join(" · ") : "";
}

function linked() {
  try {
    return find(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return null; // A broken escape: not a link of ours.
  }
}

function choose() {
  const cell = linked();
  for (const other of document.querySelectorAll("a.cell")) other.ariaCurrent = other === cell ? "true" : "false";
  state.cell = cell?.matches("a.cell") ? { ...cell.dataset } : null;
  restart();
  if (state.cell) find("cases-title").scrollIntoView();
}

function leave() {
  history.pushState(null, "", location.pathname + location.search);
  choose();
}

function restart() {
  state.shown = PAGE;
  draw();
}

for (const cell of document.querySelectorAll("a.cell")) {
  cell.addEventListener("click", (event) => {
    if (cell.ariaCurrent !== "true") return;
    event.preventDefault();
    leave();
  });
}
addEventListener("hashchange", choose);
addEventListener("popstate", choose);
document.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
find("filter").addEventListener("input", restart);
find("only-red").addEventListener("change", restart);
find("clear").addEventListener("click", leave);
find("more").addEventListener("click", () => { state.shown += PAGE; draw(); });
choose();

"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  // --- the theme: as the system, light or dark ------------------------------------------------------
  const system = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["as the system", "light", "dark"];
  let theme = 0;

  function applyTheme() {
    const dark = theme === 2 || (theme === 0 && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = "Theme: " + themes[theme];
    draw();
  }
  $("theme").addEventListener("click", () => { theme = (theme + 1) % 3; applyTheme(); });
  system.addEventListener("change", applyTheme);

  // --- charts ---------------------------------------------------------------------------------------
  const drawn = {};
  function looks() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
    const text = { labelColor: soft, titleColor: soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      background: "transparent", font: getComputedStyle(document.body).fontFamily, aria: false,
      view: { stroke: null }, rule: { color: ink }, style: { cell: { stroke: null } },
      axis: { ...text, gridColor: line, domainColor: line, tickColor: line },
      legend: { ...text, orient: "top", labelLimit: 220, columns: innerWidth < 560 ? 1 : 4 },
    };
  }
  async function draw() {
    const config = looks();
    for (const place of document.querySelectorAll("[data-chart]")) {
      if (!place.clientWidth) continue;  // folded away: it has no width to draw in
      const name = place.dataset.chart;
      const number = (drawn[name]?.number ?? 0) + 1;
      drawn[name]?.view?.finalize();
      drawn[name] = { number };
      const result = await vegaEmbed(place, data.charts[name], {
        config, actions: false, renderer: "svg", ast: true, defaultStyle: false, tooltip: { disableDefaultStyle: true },
      });
      place.querySelector("svg").setAttribute("aria-hidden", "true");  // the element around it is described
      if (drawn[name].number === number) drawn[name].view = result; else result.finalize();
    }
    document.documentElement.dataset.drawn = String(Object.keys(drawn).length);
  }

  for (const folded of document.querySelectorAll("details")) {
    folded.addEventListener("toggle", () => { if (folded.open && folded.querySelector("[data-chart]")) draw(); });
  }

  // --- the table: columns of arrays, of which a page is shown ---------------------------------------
  const t = data.table, count = t.names.length, size = 50;
  const pathOf = (i) => t.folders.texts[t.folders.of[i]] + t.names[i];
  const infinite = (v) => (v === "inf" ? Infinity : v);
  const columns = [
    { name: "path", text: pathOf, value: pathOf, kind: "path" },
    { name: "class", text: (i) => t.classes.texts[t.classes.of[i]], value: (i) => t.classes.texts[t.classes.of[i]] },
    { name: "score", text: (i) => shown(t.score[i]), value: (i) => infinite(t.score[i]), kind: "number" },
    { name: "p-value", text: (i) => shown(t.p[i]), value: (i) => t.p[i], kind: "number" },
    { name: "verdict", text: (i) => (t.p[i] === null ? "not readable" : t.flagged[i] ? "flagged" : "not flagged"), value: (i) => (t.p[i] === null ? -1 : t.flagged[i]) },
  ];
  if (t.sets.texts.length > 1) columns.splice(1, 0, { name: "set", text: (i) => t.sets.texts[t.sets.of[i]], value: (i) => t.sets.texts[t.sets.of[i]] });
  if (t.selected) columns.push({ name: "selected", text: (i) => (t.p[i] === null ? "" : t.selected[i] ? "yes" : "no"), value: (i) => t.selected[i] });
  for (const [name, values] of Object.entries(t.members)) columns.push({ name: "p of " + name, text: (i) => shown(values[i]), value: (i) => values[i], kind: "number" });
  if (t.remarks.texts.some(Boolean)) columns.push({ name: "note", text: (i) => t.remarks.texts[t.remarks.of[i]], value: (i) => t.remarks.texts[t.remarks.of[i]] });

  function shown(value) { return value === null ? "" : value === "inf" ? "infinite" : String(value); }

  let sort = { column: columns.findIndex((c) => c.name === "score"), down: true };
  let rows = [], first = 0;

  const head = document.querySelector("#table thead tr");
  columns.forEach((column, number) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    cell.scope = "col";
    if (column.kind === "number") cell.className = "number";
    button.type = "button";
    button.addEventListener("click", () => {
      sort = { column: number, down: sort.column === number ? !sort.down : column.name === "score" };
      update();
    });
    cell.append(button);
    head.append(cell);
  });

  function options(id, texts) {
    const select = $(id);
    if (!select) return;
    texts.forEach((text, number) => {
      const option = document.createElement("option");
      option.value = String(number);
      option.textContent = text || "none";
      select.append(option);
    });
    select.addEventListener("change", update);
  }
  options("class", t.classes.texts);
  options("set", t.sets.texts);
  $("verdict").addEventListener("change", update);
  let waiting;
  $("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(update, 150); });
  $("filters").addEventListener("submit", (event) => { event.preventDefault(); update(); });
  $("previous").addEventListener("click", () => { first -= size; show(); });
  $("next").addEventListener("click", () => { first += size; show(); });

  const verdicts = {
    flagged: (i) => t.flagged[i], fine: (i) => t.p[i] !== null && !t.flagged[i],
    selected: (i) => t.selected[i], unreadable: (i) => t.p[i] === null,
  };
  function update() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const verdict = verdicts[$("verdict").value], chosen = $("class").value, set = $("set") ? $("set").value : "";
    rows = [];
    for (let i = 0; i < count; i++) {
      if (verdict && !verdict(i)) continue;
      if (chosen !== "" && t.classes.of[i] !== Number(chosen)) continue;
      if (set !== "" && t.sets.of[i] !== Number(set)) continue;
      if (words.length) {
        const text = (pathOf(i) + " " + t.classes.texts[t.classes.of[i]] + " " + t.remarks.texts[t.remarks.of[i]]).toLowerCase();
        if (!words.every((word) => text.includes(word))) continue;
      }
      rows.push(i);
    }
    const value = columns[sort.column].value, keys = new Array(count);
    for (const i of rows) keys[i] = value(i);
    const sign = sort.down ? -1 : 1;
    rows.sort((a, b) => {
      const x = keys[a], y = keys[b];
      if (x === y) return a - b;
      if (x === null) return 1;  // what is missing comes last, however the table is sorted
      if (y === null) return -1;
      return x < y ? -sign : sign;
    });
    first = 0;
    show();
  }

  function show() {
    head.querySelectorAll("th").forEach((cell, number) => {
      const here = number === sort.column;
      if (here) cell.setAttribute("aria-sort", sort.down ? "descending" : "ascending"); else cell.removeAttribute("aria-sort");
      cell.firstChild.textContent = columns[number].name + (here ? (sort.down ? " ▼" : " ▲") : "");
    });
    const body = document.querySelector("#table tbody"), some = rows.slice(first, first + size);
    body.replaceChildren(...some.map((i) => {
      const row = document.createElement("tr");
      if (t.flagged[i] && t.p[i] !== null) row.className = "flagged";
      row.append(...columns.map((column) => {
        const cell = document.createElement("td");
        cell.textContent = column.text(i);
        if (column.kind) cell.className = column.kind;
        return cell;
      }));
      return row;
    }));
    const number = (n) => n.toLocaleString("en");
    $("status").textContent = number(rows.length) + " of " + number(count) + " images";
    $("place").textContent = rows.length ? number(first + 1) + " to " + number(first + some.length) : "none";
    $("previous").disabled = first === 0;
    $("next").disabled = first + size >= rows.length;
  }

  update();
  applyTheme();
})();

"use strict";
(async () => {
  const $ = (id) => document.getElementById(id);
  const newElement = (name, text, kind) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  // --- the theme: as the system, light or dark ------------------------------------------------------
  const system = matchMedia("(prefers-color-scheme: dark)");
  const themes = ["as the system", "light", "dark"];
  let theme = 0;
  function applyTheme() {
    const dark = theme === 2 || (theme === 0 && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").textContent = "Theme: " + themes[theme];
  }
  $("theme").addEventListener("click", () => { theme = (theme + 1) % 3; applyTheme(); });
  system.addEventListener("change", applyTheme);
  applyTheme();

  // --- judging --------------------------------------------------------------------------------------
  let about = { most_bytes: Infinity, fill: false };
  let turn = 0, address = "";

  async function judge(image) {
    const mine = ++turn;
    const late = () => mine !== turn;  // another image was given meanwhile
    $("result").classList.add("busy");
    $("status").hidden = false;
    $("status").className = "";
    $("status").textContent = "The guard looks at the image ...";
    $("failure").hidden = true;
    try {
      if (!image || !image.size) throw new Error("the file is empty");
      if (image.size > about.most_bytes) {
        throw new Error(`the file is too large: it may have ${Math.floor(about.most_bytes / 2 ** 20)} MiB`);
      }
      const answer = await ask(image);
      if (!late()) show(answer, image);
    } catch (error) {
      if (!late()) fail(error.message);
    } finally {
      if (!late()) $("result").classList.remove("busy");
    }
  }

  async function ask(image) {
    let answer;
    try {
      answer = await fetch("judge", { method: "POST", body: image, headers: { "Content-Type": "application/octet-stream" } });
    } catch {
      throw new Error("gramwatch does not answer, or the file cannot be read. Does the command still run in its terminal?");
    }
    const verdict = await answer.json().catch(() => ({ error: `the answer has the status ${answer.status}` }));
    if (!answer.ok) throw new Error(verdict.error);
    return verdict;
  }

  function fail(reason) {
    $("status").hidden = true;
    $("answer").hidden = true;
    $("failure").textContent = "No verdict. " + reason[0].toUpperCase() + reason.slice(1) + (/[.?]$/.test(reason) ? "" : ".");
    $("failure").hidden = false;
    inView();
  }

  // --- the answer -----------------------------------------------------------------------------------
  const short = (value, digits = 2) => String(Number(value.toPrecision(digits)));

  function show(verdict, image) {
    const named = verdict.class === null ? `class ${verdict.predicted}` : verdict.class;
    $("verdict").className = verdict.is_ood ? "flagged" : "";
    $("said").textContent = verdict.is_ood ? "✗ Flagged" : "✓ Not flagged";
    $("predicted").textContent = `The network says: ${named}`;
    const score = verdict.score === null ? "The score is infinite" : `The score is ${short(verdict.score, 3)}`;
    const limit = verdict.threshold === null ? "" : `; images above ${short(verdict.threshold, 3)} are flagged`;
    $("how").textContent = `${score}${limit}. Compared: ${verdict.compared} (p = ${short(verdict.p_value)}).`;
    showPictures(verdict, image);
    $("sentences").replaceChildren(...verdict.sentences.map((text) => newElement("li", text)));
    $("members").hidden = verdict.members.length < 2;
    const most = Math.max(...verdict.members.map((member) => member.adds), 1e-9);
    document.querySelector("#members tbody").replaceChildren(...verdict.members.map((member) => row(member, most, verdict.is_ood)));
    $("notes").hidden = !verdict.notes.length;
    document.querySelector("#notes ul").replaceChildren(...verdict.notes.map((text) => newElement("li", text)));
    $("answer").hidden = false;
    $("status").textContent = `${verdict.is_ood ? "Flagged" : "Not flagged"}. The network says: ${named}.`;
    $("status").hidden = false;
    $("status").className = "unseen";  // read aloud; the same is in the box
    inView();
  }

  function showPictures(verdict, image) {
    if (address) URL.revokeObjectURL(address);
    address = URL.createObjectURL(image);
    $("f-given").hidden = false;
    $("given").onerror = () => { $("f-given").hidden = true; };  // the browser does not know TIFF
    $("given").onload = () => { $("given").classList.toggle("few", $("given").naturalWidth < 100); };
    $("given").src = address;
    $("seen").src = verdict.input;
    $("f-map").hidden = verdict.map === null;
    if (verdict.map !== null) $("map").src = verdict.map;
    $("map-says").textContent = verdict.map === null ? "There is no map for this image: the notes say why."
      : "The redder a place, the more it adds to the score. The reddest place of every image is equally red, also if nothing is unusual.";
  }

  function row(member, most, flagged) {
    const line = newElement("tr"), name = newElement("th", member.name + (member.sees ? ` (${member.sees})` : "")), bar = newElement("td", undefined, "bar");
    name.scope = "row";
    if (member.adds > 0) {
      const filled = newElement("div", undefined, flagged ? "flagged" : "");
      filled.style.width = `${100 * member.adds / most}%`;
      bar.append(filled);
    }
    line.append(name, newElement("td", member.adds.toFixed(2), "number"), bar, newElement("td", member.p_value === null ? "" : short(member.p_value), "number"));
    return line;
  }

  function inView() {  // where the verdict is below the image
    if (innerWidth <= 860) $("result").scrollIntoView();
  }

  // --- files: chosen, dropped, pasted ---------------------------------------------------------------
  $("file").addEventListener("change", () => { if ($("file").files.length) give($("file").files); });
  function give(files) {
    pressed(null);
    judge(files[0]);
  }
  let inside = 0;
  const carriesFiles = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragenter", (event) => { if (carriesFiles(event)) { inside++; choose("file"); $("drop").classList.add("over"); } });
  addEventListener("dragleave", (event) => { if (carriesFiles(event) && --inside <= 0) $("drop").classList.remove("over"); });
  addEventListener("dragover", (event) => { event.preventDefault(); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    inside = 0;
    $("drop").classList.remove("over");
    if (event.dataTransfer.files.length) give(event.dataTransfer.files);
    else fail("no file was dropped. Drag the image from a folder, or paste it");
  });
  addEventListener("paste", (event) => { if (event.clipboardData.files.length) give(event.clipboardData.files); });

  // --- three ways -----------------------------------------------------------------------------------
  const ways = document.querySelectorAll("#ways input");
  function choose(way) {
    ways.forEach((input) => { input.checked = input.value === way; $("way-" + input.value).hidden = input.value !== way; });
    if (way === "camera") startCamera(); else stopCamera();
  }
  ways.forEach((input) => input.addEventListener("change", () => choose(input.value)));

  // --- drawing --------------------------------------------------------------------------------------
  const canvas = $("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
  let strokes = [];  // of points from 0 to 1, so that ink and paper can be changed later
  function redraw() {
    pen.fillStyle = $("paper").value;
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.strokeStyle = $("ink").value;
    pen.lineCap = pen.lineJoin = "round";
    for (const { width, points } of strokes) {
      pen.lineWidth = width;
      pen.beginPath();
      points.forEach(([x, y], i) => { if (i) pen.lineTo(x, y); else { pen.moveTo(x, y); pen.lineTo(x, y); } });
      pen.stroke();
    }
  }
  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
  }
  let drawing = false;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    drawing = true;
    strokes.push({ width: Number($("width").value), points: [place(event)] });
    redraw();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    strokes[strokes.length - 1].points.push(place(event));
    redraw();
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drawing = false; });
  $("clear").addEventListener("click", () => { strokes = []; redraw(); });
  for (const id of ["ink", "paper"]) $(id).addEventListener("input", redraw);
  redraw();

  $("judge-drawing").addEventListener("click", async () => {
    pressed(null);
    if (!strokes.length) return fail("nothing is drawn");
    await judge(await png(about.fill ? filled() : canvas));
  });

  // The drawing alone, in a square that it fills.
  function filled() {
    const at = strokes.flatMap(({ width, points }) => points.map(([x, y]) => [x, y, width / 2]));
    const edges = (sign, axis) => at.map((point) => point[axis] + sign * point[2]);
    const left = Math.max(0, Math.min(...edges(-1, 0))), right = Math.min(canvas.width, Math.max(...edges(1, 0)));
    const top = Math.max(0, Math.min(...edges(-1, 1))), bottom = Math.min(canvas.height, Math.max(...edges(1, 1)));
    const width = Math.max(1, right - left), height = Math.max(1, bottom - top), side = Math.max(width, height);
    const square = newElement("canvas"), to = square.getContext("2d");
    square.width = square.height = canvas.width;
    const scale = square.width / side;
    to.fillStyle = $("paper").value;
    to.fillRect(0, 0, square.width, square.height);
    to.drawImage(canvas, left, top, width, height, (side - width) / 2 * scale, (side - height) / 2 * scale, width * scale, height * scale);
    return square;
  }
  const png = (from) => new Promise((done) => from.toBlob(done, "image/png"));

  // --- the camera -----------------------------------------------------------------------------------
  let stream = null;
  const says = (text) => { $("camera-says").textContent = text; };
  async function startCamera() {
    if (stream) return;
    if (!navigator.mediaDevices) return says("This browser gives no camera to this page. Open it as http://127.0.0.1 or http://localhost.");
    says("Waiting for the camera ...");
    try {
      const opened = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
      if ($("way-camera").hidden) return opened.getTracks().forEach((track) => track.stop());
      stream = opened;
      $("video").srcObject = stream;
      await $("video").play();
      $("photograph").disabled = false;
      says("");
    } catch (error) {
      says({ NotAllowedError: "The camera was not allowed. Allow it in the browser, and choose Camera again.",
        NotFoundError: "There is no camera here." }[error.name] || `The camera cannot be used: ${error.message}`);
    }
  }
  function stopCamera() {
    if (stream) stream.getTracks().forEach((track) => track.stop());
    stream = null;
    $("video").srcObject = null;
    $("photograph").disabled = true;
  }
  $("photograph").addEventListener("click", async () => {
    const video = $("video"), still = newElement("canvas");
    still.width = video.videoWidth;
    still.height = video.videoHeight;
    still.getContext("2d").drawImage(video, 0, 0);
    pressed(null);
    await judge(await png(still));
  });

  // --- what is known of the guard, and examples -----------------------------------------------------
  function pressed(chosen) {
    document.querySelectorAll("#examples button").forEach((button) => button.setAttribute("aria-pressed", String(button === chosen)));
  }
  function example(name, number) {
    const item = newElement("li"), button = newElement("button"), image = newElement("img");
    button.type = "button";
    button.title = name;
    button.setAttribute("aria-pressed", "false");
    image.alt = name;
    image.src = `examples/${number}`;
    button.append(image);
    button.addEventListener("click", async () => {
      pressed(button);
      try { await judge(await (await fetch(image.src)).blob()); } catch { fail("gramwatch does not answer. Does the command still run in its terminal?"); }
    });
    item.append(button);
    return item;
  }
  try {
    about = await (await fetch("about")).json();
  } catch {
    return fail("gramwatch does not answer. Start the command again and reload the page");
  }
  document.title = `${about.title} · gramwatch live`;
  $("title").textContent = about.title;
  $("about").textContent = about.about;
  $("filled").hidden = !about.fill;
  $("try").hidden = !about.examples.length;
  $("examples").replaceChildren(...about.examples.map(example));
  $("facts").replaceChildren(...about.facts.map(([name, value]) => {
    const pair = newElement("div");
    pair.append(newElement("dt", name), newElement("dd", value));
    return pair;
  }));
  document.documentElement.dataset.ready = "true";
})();

// Slides: fit, move, notes, clock. `present.ready` is a promise for the time when all slides fit.
"use strict";
(() => {
  const root = document.documentElement, main = document.getElementById("slides");
  const slides = () => [...main.querySelectorAll(":scope > .slide")];
  const began = Date.now();
  let at = 0, speaker = null;

  // -- fit: smaller type by steps, down to 24 px of 1920 × 1080; then what is left over goes to a next slide ----------
  const SLACK = 2;
  const bodyOf = (slide) => slide.querySelector(":scope > .body");
  const overflows = (slide) => {
    const body = bodyOf(slide);
    return body.scrollHeight > body.clientHeight + SLACK || body.scrollWidth > body.clientWidth + SLACK
      || slide.scrollHeight > slide.clientHeight + SLACK;
  };
  const tooWide = (block) => block.scrollWidth > bodyOf(block.closest(".slide")).clientWidth + SLACK;

  function narrow(slide) {  // what is too wide is set smaller, then wrapped
    for (const block of slide.querySelectorAll(":scope > .body > .block")) {
      const pre = block.querySelector("pre");
      if (pre && tooWide(block)) pre.classList.add("long");
      if (pre && tooWide(block)) pre.classList.add("wrapped");
      if (!pre && tooWide(block)) block.classList.add("wrapping");
    }
  }

  function fit(slide) {
    if (!overflows(slide)) return;
    for (const step of ["tight1", "tight2", "tight3"]) {
      slide.classList.remove("tight1", "tight2", "tight3");
      slide.classList.add(step);
      if (!overflows(slide)) return;
    }
    narrow(slide);
    if (!overflows(slide)) return;
    const next = slide.cloneNode(false);
    next.classList.remove("tight1", "tight2", "tight3", "title");
    next.append(...[...slide.children].map((part) => part.cloneNode(!part.classList.contains("body"))));
    if (slide.classList.contains("title")) {
      const old = next.querySelector("h1"), head = document.createElement("h2");
      head.innerHTML = old.innerHTML; old.replaceWith(head);
    }
    next.querySelector(".notes").textContent = "[]";
    const rest = bodyOf(next), body = bodyOf(slide);
    slide.classList.remove("tight1", "tight2", "tight3");
    if (!body.querySelector("table, pre")) slide.classList.add("tight1"); else slide.classList.add("tight2");
    while (body.children.length > 1 && overflows(slide)) rest.prepend(body.lastElementChild);
    if (overflows(slide)) {
      const part = divide(body.lastElementChild, () => overflows(slide));
      if (part) rest.prepend(part); else { console.warn("slide cannot be parted", slide); return; }
    }
    if (!rest.children.length) return;
    slide.after(next);
    fit(slide);
    fit(next);
  }

  // Move rows, items, lines or words of a block to a copy of it, from its end, as long as `over`.
  function divide(block, over) {
    const copy = block.cloneNode(true);
    const table = block.querySelector("tbody"), list = block.querySelector("ul, ol"), pre = block.querySelector("pre");
    const parted = (mine, other, keep) => {
      while (mine.childNodes.length > keep && over()) {
        other.prepend(mine.lastChild);
      }
      return other.childNodes.length ? copy : null;
    };
    if (table || list) {
      const mine = table || list, other = copy.querySelector(table ? "tbody" : "ul, ol");
      other.replaceChildren();
      if (list && !table && list.tagName === "OL") {
        const done = parted(mine, other, 1);
        other.start = (list.start || 1) + [...list.children].length;
        return done;
      }
      return parted(mine, other, 1);
    }
    if (pre) {
      const lines = pre.innerHTML.split("\n"), moved = [], other = copy.querySelector("pre");
      while (lines.length > 1 && over()) { moved.unshift(lines.pop()); pre.innerHTML = lines.join("\n"); }
      other.innerHTML = moved.join("\n");
      return moved.length ? copy : null;
    }
    const words = block.querySelector("p, .workbench-text"), other = copy.querySelector("p, .workbench-text");
    if (!words) return null;
    other.replaceChildren();
    return parted(words, other, 1);
  }

  function fitAll() {
    const mine = slides().filter((slide) => !slide.classList.contains("panel"));
    for (const slide of mine) { narrowFirst(slide); fit(slide); }
    for (const slide of slides()) if (/panel|picture/.test(slide.className)) {
      const image = slide.querySelector(".block img");  // a tall one gets the whole height, for larger letters
      if (image && image.naturalHeight > 0.56 * image.naturalWidth) slide.classList.add("tall");
    }
    for (const slide of slides()) if (!/panel|picture|title|question|tight/.test(slide.className)) enlarge(slide);
    laidOut = sizeOf();
  }
  // All lengths go with the window, and letters are whole pixels in some browsers: what was full may be too full.
  const sizeOf = () => `${innerWidth} × ${innerHeight}`;
  let laidOut = "";
  function refit() {
    if (!laidOut || laidOut === sizeOf()) return;
    laidOut = sizeOf();
    const shown = slides()[at];
    for (const slide of slides()) if (!slide.classList.contains("panel") && overflows(slide)) {
      slide.classList.remove("large1", "large2", "sparse");
      fit(slide);
    }
    root.dataset.slides = String(slides().length);
    show(slides().indexOf(shown));
  }
  // What leaves room is set larger.
  function enlarge(slide) {
    const wide = () => [...slide.querySelectorAll(".body > .block")].some(tooWide) || slide.querySelector("pre.long");
    for (const step of ["large2", "large1"]) {
      slide.classList.add(step);
      if (!overflows(slide) && !wide()) break;
      slide.classList.remove(step);
    }
    const body = bodyOf(slide), last = body.lastElementChild;
    if (!last) return;
    const used = last.getBoundingClientRect().bottom - body.getBoundingClientRect().top;
    if (used < 0.5 * body.clientHeight) slide.classList.add("sparse");
  }
  function narrowFirst(slide) {  // printed lines and formulas that are too wide need no smaller prose
    for (const block of slide.querySelectorAll(":scope > .body > .block:has(math[display=block])"))
      for (const step of ["long1", "long2"]) if (tooWide(block)) block.classList.add(step);
    for (const block of slide.querySelectorAll(":scope > .body > .block")) {
      const pre = block.querySelector("pre");
      if (pre && tooWide(block)) { pre.classList.add("long"); if (tooWide(block)) pre.classList.add("wrapped"); }
    }
  }

  // -- move: what is deeper can be left out, so that next and previous pass over it; down and up go into it -----------
  const isDeeper = (slide) => Boolean(slide) && slide.classList.contains("deeper");
  function beside(step) {  // the slide to go to, by its number; where there is none, this
    const every = slides(), part = every[at].dataset.deeper;
    let to = at + step;
    while (isDeeper(every[to]) && every[to].dataset.deeper !== part) to += step;
    return every[to] ? to : at;
  }
  function sitting(number) {
    const to = slides().findIndex((slide) => slide.dataset.sitting.startsWith(`Sitting ${number}: `));
    if (to >= 0) show(to);
  }
  const plain = (slide) => (slide.querySelector("h1, h2") || slide).textContent;
  function show(number, remember = true) {
    const every = slides();
    at = Math.max(0, Math.min(every.length - 1, number));
    every.forEach((slide, i) => slide.classList.toggle("shown", i === at));
    foot.querySelector(".number").textContent = `${at + 1} / ${every.length}`;
    foot.querySelector(".name").textContent = [document.title, every[at].dataset.sitting].filter(Boolean).join(" · ");
    foot.querySelector(".below").textContent =
      isDeeper(every[at + 1]) && every[at + 1].dataset.deeper !== every[at].dataset.deeper ? `↓ deeper: ${plain(every[at + 1])}` : "";
    bar.style.width = `${100 * (at + 1) / every.length}%`;
    if (remember) history.replaceState(null, "", `#${at + 1}`);
    const active = document.activeElement;
    if (active && active !== document.body && !every[at].contains(active)) active.blur();
    state();
    tell();
    window.dispatchEvent(new Event("resize"));
  }

  // -- a panel's slide: live, or as recorded ---------------------------------------------------------------------------
  function state() {
    const slide = slides()[at], alive = slide.classList.contains("alive");
    const button = foot.querySelector("button");
    button.hidden = !alive;
    button.textContent = slide.classList.contains("stored") ? "R  live" : "R  recorded";
    const kernel = foot.querySelector(".kernel"), place = slide.querySelector(".live");
    const isRecorded = slide.classList.contains("panel") && (!alive || slide.classList.contains("stored"));
    const failed = ended || (place && place.dataset.failed);
    kernel.classList.toggle("failed", Boolean(failed));
    kernel.textContent = [isRecorded && "recorded",
      failed || (isRecorded && place && !alive && "the live panel is starting …")].filter(Boolean).join("; ");
  }
  // -- no kernel (any more): the recorded results, and words that stay ------------------------------------------------
  const START_MS = 75_000, LOOK_MS = 2_000;  // the server gives a kernel a minute to start
  let ended = "";
  function end(words) {
    ended = words;
    for (const slide of slides()) if (slide.matches(".alive")) slide.classList.add("stored");
    state();
    tell();
    window.dispatchEvent(new Event("resize"));
  }
  function attend() {
    if (!main.querySelector(".live")) return;
    let silent = 0;
    const timer = setInterval(async () => {
      const said = document.getElementById("jupyter-config-data");
      if (!said) {
        if (Date.now() - began > START_MS) end("the kernel did not start: reload the page to try again");
      } else {
        const { baseUrl, kernelId } = JSON.parse(said.textContent);
        try {
          const answer = await fetch(`${baseUrl}api/kernels/${kernelId}`);
          silent = 0;
          if (answer.status === 404) end("the kernel has ended: reload the page for another");
        } catch {
          silent += 1;
          if (silent === 3) end("the server has ended: keep this page, it cannot be loaded again");
        }
      }
      if (ended) clearInterval(timer);
    }, LOOK_MS);
  }
  function recorded() {
    slides()[at].classList.toggle("stored");
    state();
    window.dispatchEvent(new Event("resize"));
  }
  // The picture as large as its place allows; the panel's own notes under the pointer go by its edges.
  function enlargePictures() {
    for (const stage of main.querySelectorAll(".slide.alive .workbench-stage")) {
      const picture = stage.querySelector(".workbench-picture"), image = stage.querySelector("img");
      if (!image) continue;
      if (!image.naturalWidth) { image.addEventListener("load", enlargePictures, { once: true }); continue; }
      const ratio = image.naturalWidth / image.naturalHeight;
      const width = Math.floor(Math.min(stage.clientWidth, stage.clientHeight * ratio));
      picture.style.width = `${width}px`;
      picture.style.height = `${Math.floor(width / ratio)}px`;
    }
  }
  // Beside the picture there is one column for what is set and said.
  const CROWDED = ["crowded1", "crowded2", "crowded3"];
  function crowd() {
    for (const panel of main.querySelectorAll(".slide.alive:not(.more) .workbench-panel")) {
      const slide = panel.closest(".slide");
      slide.classList.remove(...CROWDED, "asks");
      const question = panel.children[0].querySelector(".workbench-text");
      if (question && question.clientHeight > 2 * parseFloat(getComputedStyle(question).fontSize)) slide.classList.add("asks");
      const wide = panel.children[5];
      const full = () => panel.scrollHeight > panel.clientHeight + 1 || panel.scrollWidth > panel.clientWidth + 1
        || (wide.clientHeight && [...wide.querySelectorAll("*")].some((one) => one.scrollWidth > wide.clientWidth + 1));
      for (const step of CROWDED) { if (!full()) break; slide.classList.add(step); }
    }
    enlargePictures();
  }
  function more() {
    const slide = slides()[at];
    if (slide.classList.contains("alive")) slide.classList.toggle("more");
    crowd();
  }
  function watch() {  // until each place has its panel
    for (const place of main.querySelectorAll(".live")) {
      const look = () => {
        const error = place.querySelector('[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]');
        if (error && !place.querySelector(".workbench-panel")) {
          place.dataset.failed = `no live panel: ${error.textContent.trim().split("\n").pop()}`;
          state();
        }
        if (!place.querySelector(".workbench-panel img")) return;
        place.closest(".slide").classList.add("alive");
        seen.disconnect();
        let waits = 0;  // what a run says changes many times a second
        const changed = () => { cancelAnimationFrame(waits); waits = requestAnimationFrame(crowd); };
        new MutationObserver(changed).observe(place, { childList: true, subtree: true, characterData: true });
        state();
        window.dispatchEvent(new Event("resize"));
      };
      const seen = new MutationObserver(look);
      seen.observe(place, { childList: true, subtree: true });
      look();
    }
  }

  // -- the speaker's view ----------------------------------------------------------------------------------------------
  function openSpeaker() {
    if (speaker && !speaker.closed) { speaker.focus(); return; }
    speaker = window.open("", "speaker", "width=1280,height=800");
    if (!speaker) { foot.querySelector(".kernel").textContent = "the browser has blocked the speaker's window"; return; }
    const page = speaker.document;
    page.title = `Speaker: ${document.title}`;
    page.head.innerHTML = "";
    for (const style of document.querySelectorAll("style")) page.head.append(page.importNode(style, true));
    const own = page.createElement("style");
    own.textContent = `
      :root { font-size: min(calc(58vw / 120), calc(58vh / 67.5)); }
      body.speaker { background: var(--ground); color: var(--ink); overflow: auto; height: auto; margin: 12px; }
      .speaker .two { display: flex; gap: 16px; align-items: flex-start; }
      .speaker .frame { position: relative; width: 120rem; height: 67.5rem; border: 1px solid var(--line); flex: none;
        overflow: hidden; pointer-events: none; }
      .speaker .next { zoom: .62; } .speaker .frame .slide { visibility: visible; }
      .speaker .times { display: flex; gap: 32px; font-size: 30px; margin: 10px 0; font-variant-numeric: tabular-nums; }
      .speaker .said { font-size: 20px; line-height: 1.45; white-space: pre-wrap; max-width: 72em; }
      .speaker .said p { margin: 0 0 12px; } .speaker small { font-size: 15px; color: var(--soft); }`;
    page.head.append(own);
    page.body.className = "speaker";
    page.body.innerHTML = '<div class="two"><div class="frame now"></div><div><small>next</small><div class="frame next">'
      + '</div></div></div><div class="times"><span class="number"></span><span class="clock"></span>'
      + '<span class="elapsed"></span></div><div class="said"></div>';
    speaker.addEventListener("keydown", pressed, true);
    tell();
  }
  function tell() {
    if (!speaker || speaker.closed) return;
    const page = speaker.document, every = slides();
    page.documentElement.dataset.scheme = root.dataset.scheme;
    for (const [place, slide] of [[".now", every[at]], [".next", beside(1) === at ? null : every[beside(1)]]])
      page.querySelector(place).replaceChildren(...(slide ? [page.importNode(slide, true)] : []));
    page.querySelector(".number").textContent = `${at + 1} / ${every.length}`;
    const notes = JSON.parse(every[at].querySelector(".notes").textContent);
    page.querySelector(".said").replaceChildren(...notes.map((note) => {
      const line = page.createElement("p"); line.textContent = note; return line;
    }));
    tick();
  }
  function tick() {
    const now = new Date(), two = (n) => String(n).padStart(2, "0");
    const clock = `${two(now.getHours())}:${two(now.getMinutes())}`;
    foot.querySelector(".clock").textContent = clock;
    if (!speaker || speaker.closed) return;
    const s = Math.floor((Date.now() - began) / 1000);
    speaker.document.querySelector(".clock").textContent = `${clock}:${two(now.getSeconds())}`;
    speaker.document.querySelector(".elapsed").textContent = `since the start ${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
  }

  // -- keys ------------------------------------------------------------------------------------------------------------
  const KEYS = [["→  Page Down  Space  N", "next"], ["←  Page Up  Backspace  P", "previous"], ["Home  End", "first, last"],
    ["↓  ↑", "next, previous, into what is deeper, too"], ["1 … 9", "a sitting"],
    ["S", "the speaker's view"], ["R", "a panel: recorded or live"], ["M", "a panel: its words and numbers"], ["D", "dark or light"], ["B  .", "black"],
    ["F", "full screen"], ["?", "these keys"]];
  function toggle(name, make) {
    const there = document.querySelector(`.${name}`);
    if (there) there.remove(); else { const made = document.createElement("div"); made.className = name; make(made); document.body.append(made); }
  }
  const next = () => show(beside(1)), previous = () => show(beside(-1));
  const ACTIONS = {
    ArrowRight: next, PageDown: next, " ": next, n: next, ArrowLeft: previous, PageUp: previous, Backspace: previous,
    p: previous, ArrowDown: () => show(at + 1), ArrowUp: () => show(at - 1),
    Home: () => show(0), End: () => show(slides().length - 1), s: openSpeaker, r: recorded, m: more,
    d: () => scheme(root.dataset.scheme === "dark" ? "light" : "dark"),
    b: () => toggle("cover", () => {}), ".": () => toggle("cover", () => {}),
    f: () => (document.fullscreenElement ? document.exitFullscreen() : root.requestFullscreen()),
    "?": () => toggle("keys", (made) => {
      made.innerHTML = `<table>${KEYS.map(([key, words]) => `<tr><td>${key}</td><td>${words}</td></tr>`).join("")}</table>`;
    }),
  };
  const TYPED = "input, textarea, select, [role=slider], [contenteditable=true], .noUi-handle";
  function pressed(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const focused = event.target instanceof event.target.ownerDocument.defaultView.Element ? event.target : document.body;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, moves = key === "PageDown" || key === "PageUp";
    if (key === "Escape") { document.querySelectorAll(".cover, .keys").forEach((one) => one.remove()); focused.blur(); return; }
    if (!moves && focused.closest(TYPED)) return;
    if (!moves && (key === " " || key === "Enter") && focused.closest("button, [role=button], a")) return;
    const action = /^[1-9]$/.test(key) ? () => sitting(key) : ACTIONS[key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }
  function scheme(name) { root.dataset.scheme = name; tell(); }

  const foot = document.createElement("div"), bar = document.createElement("div");
  foot.className = "foot"; bar.className = "bar";
  foot.innerHTML = '<span class="name"></span><span class="below"></span><span class="kernel"></span><button type="button" hidden></button>'
    + '<span class="number"></span><span class="clock"></span>';
  foot.querySelector("button").addEventListener("click", recorded);
  // after a click Space goes to the next slide again, and does not press the button once more
  main.addEventListener("click", (event) => {
    const button = event.detail && event.target.closest("button");
    if (button) button.blur();
  });
  main.append(foot, bar);
  scheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  window.addEventListener("keydown", pressed, true);
  window.addEventListener("resize", () => { refit(); crowd(); });
  window.addEventListener("hashchange", () => show(Number(location.hash.slice(1)) - 1 || 0, false));
  setInterval(tick, 1000);
  const fonts = document.fonts ? document.fonts.ready : Promise.resolve();
  const pictures = Promise.all([...main.querySelectorAll("img")].map((image) => image.decode().catch(() => image.alt)));
  const ready = Promise.all([fonts, pictures]).then(() => {
    fitAll();
    show(Number(location.hash.slice(1)) - 1 || 0);
    watch();
    attend();
    tick();
    root.dataset.slides = String(slides().length);
  });
  window.present = { ready, show, overflows, slides, beside, end };
  show(Number(location.hash.slice(1)) - 1 || 0, false);
})();

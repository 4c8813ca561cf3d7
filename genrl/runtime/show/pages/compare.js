"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const place = `genrl-compare-${data.page}`;
  const pixels = 320; // smaller pictures are enlarged without smoothing
  let zoom = 1;
  let state = restored();

  function fresh() {
    const bytes = crypto.getRandomValues(new Uint8Array(8));
    const judge = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    return { judge, votes: [] }; // votes[k] is the answer to pair k; pairs are judged in order
  }

  function warn(text) {
    element("note").textContent = text;
    element("note").className = "warning";
  }

  function restored() {
    try {
      const kept = localStorage.getItem(place);
      return kept === null ? fresh() : JSON.parse(kept);
    } catch (error) {
      warn(`This browser keeps no votes (${error.message}): download them before you close the page.`);
      return fresh();
    }
  }

  function keep() {
    try {
      localStorage.setItem(place, JSON.stringify(state));
    } catch (error) {
      warn(`This browser keeps no votes (${error.message}): download them before you close the page.`);
    }
  }

  function player(sample, side) {
    const node = document.createElement({ image: "img", video: "video", audio: "audio" }[sample.kind]);
    node.addEventListener("error", () => warn(`This browser cannot show the ${side} ${sample.kind}.`));
    node.src = sample.url;
    if (sample.kind === "image") {
      node.alt = `the ${side} picture`;
      node.title = `click: the ${side} one is better`;
      node.classList.toggle("small", Math.max(sample.width, sample.height) < pixels);
      node.addEventListener("click", () => vote(side));
    } else {
      node.controls = true;
      node.loop = sample.kind === "video";
      node.muted = node.autoplay = node.playsInline = sample.kind === "video";
    }
    return node;
  }

  function show() {
    const done = state.votes.length, all = data.pairs.length, pair = data.pairs[done];
    element("progress").textContent = `${done} of ${all} judged, ${all - done} remaining`;
    element("bar").value = done / all;
    element("judging").hidden = pair === undefined;
    element("done").hidden = pair !== undefined;
    element("undo").disabled = done === 0;
    element("download").disabled = done === 0;
    element("left").replaceChildren();
    element("right").replaceChildren();
    element("download").classList.toggle("next", pair === undefined);
    element("zoom").hidden = element("play").hidden = true;
    if (pair === undefined) return;
    element("prompt").textContent = pair.prompt;
    element("source").hidden = pair.source === undefined;
    if (pair.source !== undefined) element("source").src = pair.source.url;
    for (const side of ["left", "right"]) {
      const sample = pair[side], figure = element(side);
      figure.className = sample.kind === "audio" ? "sound" : "";
      figure.style.aspectRatio = sample.kind === "audio" ? "auto" : `${sample.width} / ${sample.height}`;
      figure.append(player(sample, side));
    }
    element("zoom").hidden = pair.left.kind === "audio";
    element("play").hidden = pair.left.kind === "image";
    setZoom(zoom);
  }

  function vote(answer) {
    if (state.votes.length === data.pairs.length) return;
    state.votes.push(answer);
    keep();
    show();
  }

  function undo() {
    if (state.votes.length === 0) return;
    state.votes.pop();
    keep();
    show();
  }

  function setZoom(level) {
    zoom = level;
    element("level").textContent = `${zoom}×`;
    document.documentElement.style.setProperty("--zoom", zoom);
    for (const figure of [element("left"), element("right")]) { // its middle is what is seen
      figure.scrollTop = (figure.scrollHeight - figure.clientHeight) / 2;
      figure.scrollLeft = (figure.scrollWidth - figure.clientWidth) / 2;
    }
  }

  function play() {
    const players = [...document.querySelectorAll("figure video, figure audio")];
    const start = players.some((one) => one.tagName === "AUDIO") ? [next(players)] : players;
    for (const one of players) one.pause();
    for (const one of start) {
      one.currentTime = 0;
      one.play().catch((error) => warn(`The browser does not play it: ${error.message}`));
    }
  }

  // Two sounds at a time cannot be heard: the left one, then the right one, by turns.
  function next(sounds) {
    const last = sounds.findIndex((one) => one.dataset.last === "yes");
    const chosen = sounds[(last + 1) % sounds.length];
    for (const one of sounds) one.dataset.last = one === chosen ? "yes" : "no";
    return chosen;
  }

  function download() {
    const votes = {};
    state.votes.forEach((answer, k) => { votes[data.pairs[k].token] = answer; });
    const record = { format: data.format, page: data.page, judge: state.judge, votes };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(record, null, 1)], { type: "application/json" }));
    link.download = "votes.json";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  const keys = {
    ArrowLeft: () => vote("left"),
    ArrowRight: () => vote("right"),
    ArrowDown: () => vote("tie"),
    " ": () => vote("tie"),
    Backspace: undo,
    z: () => setZoom(zoom === 4 ? 1 : 2 * zoom),
    p: play,
  };
  addEventListener("keydown", (event) => {
    const act = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); // a focused button or player would act, too
    event.stopPropagation();
    if (!event.repeat) act();
  }, true);
  addEventListener("keyup", (event) => { if (event.key === " ") event.preventDefault(); }, true);

  for (const button of document.querySelectorAll("[data-answer]")) {
    button.addEventListener("click", () => vote(button.dataset.answer));
  }
  element("undo").addEventListener("click", undo);
  element("zoom").addEventListener("click", keys.z);
  element("play").addEventListener("click", play);
  element("download").addEventListener("click", download);
  const [left, right] = [element("left"), element("right")];
  for (const [one, other] of [[left, right], [right, left]]) {
    one.addEventListener("scroll", () => { other.scrollTop = one.scrollTop; other.scrollLeft = one.scrollLeft; });
  }
  show();
})();

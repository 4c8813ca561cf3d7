"use strict";
// Asks for the state of the runs again and again, and for the charts, prompts and pictures that are looked at.

const POLL_MS = 2000; // at least; else ten times what the answers took, so that the server rests most of the time
const MOST_MS = 20000; // the first look at a long run takes seconds
const parts = new Map(); // element id -> HTML as last put in
const drawn = new Map(); // key of a chart -> what of the runs it shows
const visible = new Set(); // figures on the screen
let rows = ""; // changes with the rows of metrics
let samples = null; // changes with the samples
let page = 0; // of prompts
let questions = 0; // for prompts, so far

const byId = (id) => document.getElementById(id);

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function put(id, html) {
  if (parts.get(id) === html) return;
  parts.set(id, html);
  byId(id).innerHTML = html; // the server's templates have escaped all that comes from runs
  for (const figure of byId(id).querySelectorAll("figure[data-key]")) {
    drawn.delete(figure.dataset.key);
    seen.observe(figure);
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) visible.add(entry.target);
    else visible.delete(entry.target);
  }
  draw().catch(lost);
}, { rootMargin: "300px" });

const hidden = () =>
  [...document.querySelectorAll("header input")].filter((box) => !box.checked).map((box) => box.dataset.run);

async function draw() {
  for (const figure of visible) if (!figure.isConnected) visible.delete(figure);
  const shown = `${rows} without ${hidden()}`;
  const due = [...visible].filter((figure) => drawn.get(figure.dataset.key) !== shown);
  if (!due.length) return;
  for (const figure of due) drawn.set(figure.dataset.key, shown);
  const query = new URLSearchParams([
    ...due.map((figure) => ["key", figure.dataset.key]),
    ...hidden().map((run) => ["hide", run]),
  ]);
  try {
    const found = await ask(`figures.json?${query}`);
    for (const figure of due) {
      const key = figure.dataset.key;
      if (found[key] !== undefined && drawn.get(key) === shown) figure.innerHTML = found[key];
    }
  } catch (error) {
    for (const figure of due) drawn.delete(figure.dataset.key);
    throw error;
  }
}

function showPictures(all) {
  byId("samples").hidden = all.every((pictures) => !pictures.length);
  all.forEach((pictures, run) => {
    const sheet = document.querySelector(`.sheet[data-run="${run}"]`);
    const select = sheet.querySelector("select");
    const chosen = select.selectedIndex > 0 ? select.value : null; // the first is the newest, which is followed
    const options = [{ name: "newest", url: pictures.length ? pictures[0].url : "" }, ...pictures];
    const known = [...select.options].map((option) => option.dataset.url);
    sheet.hidden = !pictures.length;
    if (known.length !== options.length || options.some((option, i) => option.url !== known[i])) {
      select.replaceChildren(...options.map(({ name, url }, i) => {
        const option = new Option(i ? name : `newest: ${options.length > 1 ? options[1].name : ""}`, i ? name : "");
        option.dataset.url = url;
        return option;
      }));
      if (chosen !== null && pictures.some(({ name }) => name === chosen)) select.value = chosen;
    }
    showPicture(sheet);
  });
}

function showPicture(sheet) {
  const option = sheet.querySelector("select").selectedOptions[0];
  const image = sheet.querySelector("img");
  if (!option || !option.dataset.url || image.getAttribute("src") === option.dataset.url) return;
  image.src = option.dataset.url;
  image.alt = option.text;
  sheet.querySelector("a").href = option.dataset.url;
}

async function showPrompts() {
  const query = new URLSearchParams({ page, find: byId("find").value });
  const asked = ++questions;
  const found = await ask(`prompts.json?${query}`);
  if (asked !== questions) return; // something else was typed meanwhile
  page = found.number;
  byId("prompts").hidden = !found.prompts && !byId("find").value;
  byId("place").textContent = found.prompts ? `page ${page + 1} of ${found.pages}, ${found.prompts} prompts` : "none";
  byId("previous").disabled = page === 0;
  byId("next").disabled = page + 1 >= found.pages;
  byId("prompt-rows").innerHTML = found.html; // as above
}

async function update() {
  const state = await ask("state.json");
  rows = state.rows;
  for (const [id, html] of Object.entries(state.parts)) put(id, html);
  showPictures(state.pictures);
  await draw();
  if (state.samples !== samples) {
    await showPrompts();
    samples = state.samples;
  }
  byId("connection").textContent = "live";
  byId("connection").className = "";
}

function lost(error) {
  console.warn(error);
  byId("connection").textContent = "no answer: is genrl watch still running?";
  byId("connection").className = "lost";
}

async function poll() {
  const began = performance.now();
  if (!document.hidden) await update().catch(lost);
  setTimeout(poll, Math.min(MOST_MS, Math.max(POLL_MS, 10 * (performance.now() - began))));
}

function turn(by) {
  page += by;
  showPrompts().catch(lost);
}

byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
byId("find").addEventListener("input", () => { page = 0; turn(0); });
for (const box of document.querySelectorAll("header input")) {
  box.addEventListener("change", () => {
    document.querySelector(`.sheet[data-run="${box.dataset.run}"]`).classList.toggle("off", !box.checked);
    draw().catch(lost);
  });
}
for (const sheet of document.querySelectorAll(".sheet")) {
  sheet.querySelector("select").addEventListener("change", () => showPicture(sheet));
}
poll();

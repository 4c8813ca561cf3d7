// Equations, which pymdownx.arithmatex marks, typeset by the KaTeX that lies beside this file: nothing comes from a network.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const text = place.textContent.trim();
    katex.render(text.slice(2, -2), place, { displayMode: text.startsWith("\\["), throwOnError: false });
  }
});

// A field on the pages of keys (configuration, metrics) that leaves only the rows with the words typed into it.
document.addEventListener("DOMContentLoaded", () => {
  const page = location.pathname.split("/").pop();
  if (page !== "configuration.html" && page !== "metrics.html") return;
  const article = document.querySelector("article");
  article.classList.add("keys");
  const blocks = [...article.children];
  const isHeading = (block) => /^H[1-4]$/.test(block.tagName);
  const rowsOf = (block) => [...block.querySelectorAll("tbody tr")];

  const field = document.createElement("input");
  field.type = "search";
  field.className = "key-filter";
  field.placeholder = "Filter the keys on this page, e.g. batch";
  field.setAttribute("aria-label", field.placeholder);
  const count = document.createElement("p");
  count.className = "key-count";
  count.setAttribute("role", "status");
  article.querySelector("h1").after(field, count);

  const matches = (row, heading, words) => {
    const text = (heading + " " + row.textContent).toLowerCase();
    return words.every((word) => text.includes(word));
  };

  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let heading = null;
    let found = 0;
    for (const block of blocks) {
      if (block.tagName === "H1") continue;
      if (isHeading(block)) {
        heading = block;
        heading.hidden = words.length > 0;
        continue;
      }
      const rows = rowsOf(block);
      for (const row of rows) {
        row.hidden = words.length > 0 && !matches(row, heading ? heading.textContent : "", words);
        if (words.length && !row.hidden) {
          found += 1;
          if (heading) heading.hidden = false;
        }
      }
      block.hidden = words.length > 0 && rows.every((row) => row.hidden);
    }
    count.textContent = words.length ? `${found} ${found === 1 ? "row" : "rows"}` : "";
  };
  field.addEventListener("input", apply);
});

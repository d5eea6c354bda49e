// Draws the page's figures in the colours of its style sheet, copies what a button is asked to copy, and reads files.
// Knows no numbers: figures come with the page, as JSON.
"use strict";

(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // A figure names colours as var(--name): they are what the style sheet says at this moment.
  function inColours(value, style) {
    if (typeof value === "string") {
      const name = /^var\((--[a-z-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => inColours(item, style));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, inColours(item, style)]));
    }
    return value;
  }

  function drawFigure(target, figure) {
    const { data, layout } = inColours(figure, getComputedStyle(document.documentElement));
    return window.Plotly.react(target, data, layout, { displayModeBar: false, responsive: true });
  }

  for (const target of window.Plotly ? document.querySelectorAll("[data-figure]") : []) {
    const figure = JSON.parse(document.getElementById(target.dataset.figure).textContent);
    const draw = () => drawFigure(target, figure).then(() => target.setAttribute("data-drawn", ""));
    dark.addEventListener("change", draw);
    target.replaceChildren();
    draw();
  }

  // Where there are scripts, a file can be chosen instead of pasting its text.
  for (const field of document.querySelectorAll("[data-fills]")) {
    const target = document.getElementById(field.dataset.fills);
    field.hidden = false;
    field.querySelector("input").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) target.value = await file.text();
    });
  }

  for (const button of document.querySelectorAll("button[data-copies]")) {
    if (!navigator.clipboard) continue;
    const text = document.getElementById(button.dataset.copies).textContent;
    button.hidden = false;
    button.addEventListener("click", () =>
      navigator.clipboard.writeText(text).then(
        () => { button.textContent = "Copied"; },
        () => { button.textContent = "Not allowed"; },
      ));
  }
})();

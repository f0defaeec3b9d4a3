// Draws the report's charts, switches methods and kinds of number, and sorts tables. `vegaEmbed` is in scope.
const specs = JSON.parse(document.getElementById("charts").textContent);
const methods = [...document.querySelectorAll("input[name=method]")];
const views = [];

const text = "currentColor"; // of the page, so that light, dark and print need no other chart
const config = {
  background: null,
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: {
    labelColor: text, titleColor: text, tickColor: text, domainColor: text, gridColor: text,
    gridOpacity: 0.15, labelFontSize: 13, titleFontSize: 14, titleFontWeight: "normal",
  },
  text: { fontSize: 13 },
};

const off = () => methods.filter((box) => !box.checked).map((box) => box.value);

async function draw(place) {
  const options = { actions: false, renderer: "svg", config, tooltip: { theme: "custom", disableDefaultStyle: true } };
  const { view } = await vegaEmbed(place, specs[place.dataset.chart], options);
  views.push(view);
  await view.signal("off", off()).runAsync();
}

// A chart needs its width: those that are not shown yet are drawn when they are.
function drawShown() {
  for (const place of document.querySelectorAll(".chart:not([data-drawn])")) {
    if (place.closest("[hidden]")) continue;
    place.dataset.drawn = "";
    draw(place).catch((error) => { place.textContent = `The chart can't be drawn: ${error}`; });
  }
}

const switchMethods = () => views.forEach((view) => view.signal("off", off()).runAsync());
methods.forEach((box) => box.addEventListener("change", switchMethods));
for (const button of document.querySelectorAll("button[data-all]")) {
  button.addEventListener("click", () => {
    methods.forEach((box) => { box.checked = Boolean(button.dataset.all); });
    switchMethods();
  });
}

for (const radio of document.querySelectorAll("fieldset.kinds input")) {
  radio.addEventListener("change", () => {
    for (const part of document.querySelectorAll(`[data-kind="${radio.name}"]`)) {
      part.hidden = part.dataset.value !== radio.value;
    }
    drawShown();
  });
}

// Cells without a number come last, whichever way the others are sorted.
function sort(heading) {
  const table = heading.closest("table");
  const up = heading.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (row) => row.cells[heading.cellIndex].dataset.value;
  const compare = (one, other) => (up ? 1 : -1) * (
    heading.dataset.type === "text" ? one.localeCompare(other, "en", { numeric: true }) : Number(one) - Number(other)
  );
  const rows = [...table.tBodies[0].rows];
  const known = rows.filter((row) => value(row) !== "").sort((one, other) => compare(value(one), value(other)));
  table.tBodies[0].append(...known, ...rows.filter((row) => value(row) === ""));
}
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => sort(button.closest("th")));
}

drawShown();

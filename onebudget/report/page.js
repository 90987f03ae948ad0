const shares = JSON.parse(document.getElementById("shares").textContent);
const detail = document.getElementById("detail");
const rows = [...document.querySelectorAll("tr.share")];
const chips = [...document.querySelectorAll("button.chip")];
function line(tag, text, name) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}
function show(at) {
  const share = shares[at];
  const facts = share.facts.map(text => line("div", text));
  detail.replaceChildren(line("b", share.name), ...facts, line("div", share.why, "dim"));
  detail.style.borderLeftColor = share.colour;
  rows.forEach((row, index) => row.classList.toggle("chosen", index === at));
}
for (const group of [rows, chips]) group.forEach((element, at) => element.addEventListener("click", () => {
  show(at);
  detail.scrollIntoView({ block: "nearest", behavior: "smooth" });
}));
const card = document.getElementById("card");
for (const event of ["plotly_click", "plotly_hover"]) card.on(event, picked => show(picked.points[0].customdata[0]));

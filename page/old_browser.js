// Runs last: if app.js could not, say what it needs. Every browser understands these lines.
if (document.querySelector("main").hidden) {
  document.getElementById("failure").textContent = document.querySelector("noscript").textContent;
  document.getElementById("failure").hidden = false;
}

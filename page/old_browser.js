// Runs last: if app.js could not, say what it needs. Every browser understands these lines.
if (!window.showPage || document.querySelector("main").hidden) {
  document.querySelector("main").hidden = true;
  document.getElementById("failure").textContent = document.querySelector("noscript").textContent;
  document.getElementById("failure").hidden = false;
}

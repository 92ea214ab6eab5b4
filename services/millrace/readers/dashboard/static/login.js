// Logs in with a token that somebody types; the token is sent once and kept nowhere.
const form = document.getElementById("form");
const problem = document.getElementById("problem");
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = document.getElementById("token");
  const token = field.value;
  field.value = "";
  try {
    const answer = await fetch("/api/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token }),
      credentials: "same-origin",
    });
    if (answer.ok) {
      location.assign("/");
      return;
    }
    problem.textContent = answer.status === 401 ? "That token is not accepted here." : `Refused (${answer.status}).`;
  } catch {
    problem.textContent = "The orchestrator does not answer.";
  }
});

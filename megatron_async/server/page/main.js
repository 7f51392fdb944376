// The page: its parts put together, and the key where the server asks for one.

import { ask, setKey } from "./api.js";
import { openChat, showDefaults } from "./chat.js";
import { lookAgain, openEngine } from "./engine.js";

const by = (id) => document.getElementById(id);

function refused() {
  const form = by("key-form");
  if (!form.hidden) return;
  form.hidden = false;
  by("key").focus();
}

async function showModel() {
  try {
    const { data } = await (await ask("v1/models")).json();
    by("model").textContent = `${data[0].id}, context of ${data[0].max_model_len.toLocaleString("en")} tokens`;
    showDefaults(data[0]);
    document.title = `${data[0].id} \u00b7 megatron_async`;
    by("key-form").hidden = true;
  } catch (error) {
    if (error.status === 401) refused();
    else setTimeout(showModel, 2000); // the model is being loaded
  }
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(by("key").value);
  by("key").value = "";
  by("key-form").hidden = true;
  lookAgain();
  showModel();
});

openChat(refused);
showModel();
openEngine(refused, showModel);

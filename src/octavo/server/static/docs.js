"use strict";
const make = (tag, text, ...children) => {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
};
const WORDS = {minimum: "≥", exclusiveMinimum: ">", maximum: "≤", minLength: "length ≥", maxLength: "length ≤",
               minItems: "items ≥", maxItems: "items ≤", maxProperties: "entries ≤"};
const kind = (schema, all) => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.filter(part => part.type !== "null").map(part => kind(part, all)).join(" | ");
  if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const ranges = Object.keys(WORDS).filter(name => name in schema).map(name => `${WORDS[name]} ${schema[name]}`);
  const items = schema.type === "array" && schema.items ? ` of ${kind(schema.items, all)}` : "";
  return (schema.type || "any") + items + (ranges.length ? ` (${ranges.join(", ")})` : "");
};
const table = (schema, all) => {
  const required = new Set(schema.required || []);
  return make("table", "", ...Object.entries(schema.properties || {}).map(([name, field]) =>
    make("tr", "", make("td", "", make("code", name), required.has(name) ? " required" : ""),
      make("td", kind(field, all)))));
};
const show = (path, method, operation, all) => {
  const head = make("summary", "", make("span", method.toUpperCase()), make("code", path), " " + operation.summary);
  head.firstChild.className = "method";
  const section = make("details", "", head);
  const body = operation.requestBody && operation.requestBody.content["application/json"];
  if (body) {
    section.append(make("p", "Body, for example:"), make("pre", JSON.stringify(body.example, null, 2)));
    section.append(table(all[body.schema.$ref.split("/").pop()], all));
  }
  for (const [status, answer] of Object.entries(operation.responses)) {
    const line = make("p", "", make("code", status), " " + answer.description);
    const schema = answer.content && answer.content["application/json"] && answer.content["application/json"].schema;
    section.append(line);
    if (status === "200" && schema && schema.$ref) section.append(table(all[schema.$ref.split("/").pop()], all));
  }
  return section;
};
fetch("openapi.json").then(response => response.json()).then(description => {
  document.getElementById("version").textContent = description.info.version;
  const all = description.components.schemas;
  document.getElementById("paths").replaceChildren(...Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => show(path, method, operation, all))));
}).catch(error => { document.getElementById("paths").textContent = `openapi.json cannot be read: ${error}`; });

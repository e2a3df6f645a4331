// Reads numbers from input fields; an error message names a field by its label.

function nameOfField(name) { return find(name).closest("label").firstChild.textContent.trim(); }

// The number in a field, or null where it is empty.
function numberIn(name) {
  const field = find(name), { validity, min, max, step } = field;
  if (validity.valid) return field.value === "" ? null : Number(field.value);
  const kind = step === "any" ? "a number" : "a whole number", got = validity.badInput ? "something else" : field.value;
  throw new Error(`"${nameOfField(name)}" must be ${kind} from ${show(Number(min))} to ${show(Number(max))}, and the field holds ${got}; correct it` +
    (field.placeholder ? " or leave it empty" : ""));
}

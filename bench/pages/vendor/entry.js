export { parse, View, Warn } from "vega";
export { compile } from "vega-lite";
export { expressionInterpreter } from "vega-interpreter";

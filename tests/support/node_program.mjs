// A program of node-llama-cpp: `node node_program.mjs MODEL`, with its folder in MOEPACK_NODE.
// Each line of standard input is a JSON array of prompts, in token ids; it gets a line with the
// greedy tokens that follow each. It ends with its input.
import {createInterface} from "node:readline";

const {getLlama} = await import(`${process.env.MOEPACK_NODE}/node_modules/node-llama-cpp/dist/index.js`);
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error"});
const model = await llama.loadModel({modelPath: process.argv[2], gpuLayers: 0, useMmap: true});
const context = await model.createContext({contextSize: 1024, batchSize: 512});
const sequence = context.getSequence();

async function continuePrompt(prompt) {
    await sequence.clearHistory();
    const tokens = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0})) {
        tokens.push(token);
        if (tokens.length === 8)
            break;
    }
    return tokens;
}

console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
    const answers = [];
    for (const prompt of JSON.parse(line))
        answers.push(await continuePrompt(prompt));
    console.log(JSON.stringify(answers));
}
process.exit(0);

import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { Scenario } from './scenario.ts';
import { startChatServer } from './server.ts';

// node test/chat-server/main.ts --scenario FILE [--port N] [--log FILE]
// Prints one JSON line with baseUrl, port and pid once it listens.
const { values } = parseArgs({
  options: {
    scenario: { type: 'string' },
    port: { type: 'string', default: '0' },
    log: { type: 'string' },
  },
});
if (values.scenario === undefined) {
  console.error('usage: node test/chat-server/main.ts --scenario FILE [--port N] [--log FILE]');
  process.exit(2);
}
const server = await startChatServer({
  scenario: Scenario.parse(JSON.parse(readFileSync(values.scenario, 'utf8'))),
  port: Number(values.port),
  ...(values.log === undefined ? {} : { log: values.log }),
});
console.log(JSON.stringify({ baseUrl: server.baseUrl, port: server.port, pid: process.pid }));

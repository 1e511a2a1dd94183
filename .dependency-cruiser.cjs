// The import table of ARCHITECTURE.md as a lint rule. `import type` counts as an import.
const ROOMS = {
  core: [],
  store: ['core'],
  sandbox: ['core'],
  engine: ['core'],
  model: ['core', 'engine/contract'],
  agent: ['core', 'model', 'sandbox/contract'],
  env: ['core', 'model', 'sandbox/contract'],
  run: ['core', 'store', 'agent', 'env', 'model', 'sandbox/contract', 'schedule', 'observe'],
  eval: [
    'core',
    'store',
    'agent',
    'env',
    'model',
    'sandbox/contract',
    'schedule',
    'observe',
    'run',
  ],
  schedule: ['core'],
  observe: ['core'],
  train: ['core', 'run', 'eval', 'env', 'model', 'schedule', 'observe', 'engine/contract'],
  server: [
    'core',
    'store',
    'sandbox',
    'engine',
    'model',
    'agent',
    'env',
    'run',
    'eval',
    'schedule',
    'observe',
    'train',
  ],
};

/** Paths a room may import: itself, whole rooms, or one file of a room (its contract). */
function allowed(room, list) {
  const paths = [`^src/${room}/`];
  for (const entry of list)
    paths.push(entry.includes('/') ? `^src/${entry}\\.ts$` : `^src/${entry}/`);
  return paths;
}

// A test may join its room with the real drivers of other rooms, as the composition root does.
const roomRules = Object.entries(ROOMS).map(([room, list]) => ({
  name: `imports-of-${room}`,
  comment: `src/${room} may import only: ${list.join(', ') || 'nothing'} (see ARCHITECTURE.md)`,
  severity: 'error',
  from: { path: `^src/${room}/`, pathNot: '\\.test\\.ts$' },
  to: { path: '^src/', pathNot: allowed(room, list) },
}));

module.exports = {
  forbidden: [
    ...roomRules,
    {
      name: 'contracts-import-core-and-contracts-only',
      severity: 'error',
      from: { path: '^src/[^/]+/contract\\.ts$' },
      to: { path: '^src/', pathNot: ['^src/core/', '^src/[^/]+/contract\\.ts$'] },
    },
    {
      name: 'core-is-pure',
      comment: 'core does no I/O: Node built-ins are not its business',
      severity: 'error',
      from: { path: '^src/core/', pathNot: '\\.test\\.ts$' },
      to: { dependencyTypes: ['core'] },
    },
    {
      name: 'algorithms-import-core-only',
      severity: 'error',
      from: { path: '^src/train/algorithms/', pathNot: '\\.test\\.ts$' },
      to: { path: '^src/', pathNot: ['^src/core/', '^src/train/algorithms/'] },
    },
    {
      name: 'render-imports-core-only',
      severity: 'error',
      from: { path: '^src/model/render/', pathNot: '\\.test\\.ts$' },
      to: { path: '^src/', pathNot: ['^src/core/', '^src/model/render/'] },
    },
    { name: 'no-cycles', severity: 'error', from: {}, to: { circular: true } },
    {
      name: 'no-orphans',
      severity: 'error',
      from: { orphan: true, path: '^src/', pathNot: '\\.(test|d)\\.ts$' },
      to: {},
    },
    {
      name: 'no-unlisted-packages',
      severity: 'error',
      from: { path: '^src/' },
      to: { dependencyTypes: ['npm-no-pkg', 'npm-unknown', 'unknown'] },
    },
    {
      name: 'not-to-dev-packages',
      severity: 'error',
      from: { path: '^src/', pathNot: '\\.test\\.ts$' },
      to: { dependencyTypes: ['npm-dev'] },
    },
    {
      name: 'no-dumping-grounds',
      severity: 'error',
      from: {},
      to: { path: '^src/.*/?(utils|helpers|legacy|common)(/|\\.ts)' },
    },
    {
      name: 'cli-is-the-root',
      comment: 'nothing imports the composition root',
      severity: 'error',
      from: { path: '^src/(?!cli/)', pathNot: '\\.test\\.ts$' },
      to: { path: '^src/cli/' },
    },
  ],
  options: {
    doNotFollow: { path: 'node_modules' },
    tsPreCompilationDeps: true,
    tsConfig: { fileName: 'tsconfig.json' },
    enhancedResolveOptions: {
      extensions: ['.ts', '.js', '.json'],
      conditionNames: ['import', 'node', 'default', 'types'],
    },
  },
};
